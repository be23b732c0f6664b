"""Runs user code in processes of its own, with a time limit, a memory limit and a replacement for a lost one.

`Service` describes a kind of worker, and `WorkerPool` asks its processes; `worker.main` is their main loop.
"""
