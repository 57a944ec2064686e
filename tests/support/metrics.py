"""Define a line of metrics.jsonl as a run writes it."""

STEP = {
    "train/reward": 0.25,
    "train/loss": -0.0123,
    "train/entropy": 1.5,
    "train/grad_norm": 0.4,
    "train/learning_rate": 3e-4,
    "train/tokens": 1000,
    "rollout/tokens_per_s": 12345.0,
    "rollout/mean_length": 9.31,
    "rollout/truncated": 0.004,
    "staleness/mean": 0.5,
    "staleness/max": 1,
    "mismatch/mean_abs": 0.00123,
    "mismatch/max_abs": 0.03,
    "time/wait": 1.0,
    "time/update": 3.0,
    "time/step": 4.0,
}
