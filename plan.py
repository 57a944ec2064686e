"""Show the devices and the memory of a run: python plan.py <the overrides of train.py>

To plan for other machines:    python plan.py +hosts=2 +gpus=8 +gpu_gib=80 model=qwen3-0.6b
"""

from lab.cli.launch import Job, run_program
from lab.plan import DESCRIBED, show_plan


def main(job: Job) -> None:
    print(show_plan(job.config))  # noqa: T201


if __name__ == "__main__":
    run_program(main, added=tuple(DESCRIBED))
