"""Process: admission, buffer, credit, plan. `python -m rl.rollouts <run folder>`, no torch."""
