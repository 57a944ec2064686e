"""Search for a better system prompt: python optimize_prompt.py env=gsm8k model.path=<folder>"""

from lab.cli.launch import Job, run_program
from lab.prompts.optimize import optimize_prompt


def main(job: Job) -> float | None:
    return optimize_prompt(
        job.config, overrides=job.overrides, choices=job.choices, command=job.command
    )


if __name__ == "__main__":
    run_program(main, "optimize_prompt")
