"""Evaluate a model: python evaluate.py env=arithmetic model.path=<folder or name on the hub>"""

from lab.cli.launch import Job, run_program
from lab.evaluation.standalone import evaluate


def main(job: Job) -> float | None:
    return evaluate(job.config, overrides=job.overrides)


if __name__ == "__main__":
    run_program(main, "evaluate")
