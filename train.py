"""Train a policy: python train.py loss=grpo env=arithmetic optim.learning_rate=1e-4

`python train.py --help` lists the choices of every group and all keys.
"""

from lab.cli.launch import Job, compose, run_program
from rl.supervisor.supervise import supervise


def main(job: Job) -> float | None:
    """Train the policy. Return the mean reward of the last ten steps, for a sweeper to maximise."""
    return supervise(job.config, overrides=job.overrides, command=job.command, compose=compose)


if __name__ == "__main__":
    run_program(main)
