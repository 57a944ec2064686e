"""Show the devices and the memory of a run: python plan.py <the overrides of train.py>

To plan for other machines:    python plan.py +hosts=2 +gpus=8 +gpu_gib=80 model=qwen3-0.6b
"""

import hydra

from lab.cli.launch import Job, launch, task
from lab.plan import PRETENDED, show_plan


@hydra.main(version_base=None, config_path="conf", config_name="train")
@task
def main(job: Job) -> None:
    """Print the plan without starting any process."""
    print(show_plan(job.config))  # noqa: T201


if __name__ == "__main__":
    launch(main, added=tuple(PRETENDED))
