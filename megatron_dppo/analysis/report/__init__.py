"""The HTML report that compares runs."""
