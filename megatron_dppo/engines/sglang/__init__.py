"""Rollout engine that uses SGLang's HTTP servers, which run in a separate Python environment."""
