"""Evaluate a model: python evaluate.py env=arithmetic model.path=<folder or name on the hub>

`python evaluate.py --help` lists the choices of every group and all keys.
"""

import hydra

from lab.cli.launch import Job, launch, task
from lab.evaluation.standalone import evaluate


@hydra.main(version_base=None, config_path="conf", config_name="evaluate")
@task
def main(job: Job) -> float | None:
    """Evaluate the model and return the mean reward."""
    return evaluate(job.config, overrides=job.overrides)


if __name__ == "__main__":
    launch(main, "evaluate")
