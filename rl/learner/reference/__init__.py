"""References: models to which a KL penalty or a distillation loss compares the policy."""
