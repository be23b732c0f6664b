"""Runs user code in worker processes with a time limit and a memory limit, and replaces lost workers.

`Service` describes a kind of worker. `WorkerPool` sends requests to its processes. `worker.run_worker` is their
main loop.
"""
