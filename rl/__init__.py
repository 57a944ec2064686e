"""Everything that moves data: configuration, processes, rollouts, buffer, plan, policy, weights."""
