"""What learns: policy, objective, reference, optimizers."""
