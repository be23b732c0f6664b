"""What other trust regions would have done with mini-batches that a run kept: no engine, one forward."""
