"""Where a run would go, and what memory it would take: python plan.py <the overrides of train.py>

For machines that are not here:    python plan.py +hosts=2 +gpus=8 +gpu_gib=80 model=qwen3-0.6b
"""

import hydra

from rl.cli.launch import Job, launch, task
from rl.supervisor.show_plan import PRETENDED, show_plan


@hydra.main(version_base=None, config_path="conf", config_name="train")
@task
def main(job: Job) -> None:
    """Print the plan; nothing is started."""
    print(show_plan(job.config, job.choices))  # noqa: T201


if __name__ == "__main__":
    launch(main, added=tuple(PRETENDED))
