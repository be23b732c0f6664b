"""Mini-batches: advantages, packing, and the balance of work between ranks."""
