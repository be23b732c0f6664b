"""Runs user code in processes of its own, with a time limit, a memory limit and a replacement for a lost one.

`Service` describes a kind of worker, `WorkerPool` asks its processes, `worker.run_worker` is their main loop.
"""
