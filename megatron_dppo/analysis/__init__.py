"""Analyses finished runs: reports, figures and what-if questions."""
