"""Training: policy, objective, critic, references and optimizers."""
