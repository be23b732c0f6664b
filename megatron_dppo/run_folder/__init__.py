"""What a run's folder holds: metrics, config and versions, who is using it, and trackers fed beside it."""
