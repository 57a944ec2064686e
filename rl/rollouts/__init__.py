"""Package of the rollouts process, which samples and plans batches without torch."""
