"""Package that checks a run, starts its processes, samples rollouts and trains the policy."""
