"""The policy being trained: Megatron-Core on one process or many."""
