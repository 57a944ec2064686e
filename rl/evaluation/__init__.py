"""Package that evaluates policies on held-out examples, during training or by a command."""
