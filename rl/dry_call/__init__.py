"""Call a run's components with made-up values before training, to find errors and facts."""
