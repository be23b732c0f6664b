"""The trust-region loss over logits."""
