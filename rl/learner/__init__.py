"""Package that trains the policy: objective, critic, references and optimizers."""
