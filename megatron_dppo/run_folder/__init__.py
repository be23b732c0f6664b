"""Run folders: metrics, config and versions, the lock, and trackers."""
