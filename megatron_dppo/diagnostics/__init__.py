"""What a run measures, where it writes it, and the report that compares runs."""
