"""What is read after a run: reports, figures and what-if questions."""
