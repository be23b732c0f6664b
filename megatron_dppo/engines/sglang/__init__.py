"""Rollouts from SGLang's HTTP servers, which run in a Python environment of their own."""
