"""Measure what the token record adds to the processor time of an update, and its size.

    python -m benchmarks.recording [--env wiki-search] [--rows 256] [--repeats 5]

Rows are those of the environment's expert, all recorded, one thread. `tokens` counts those that the
policy chose. `of_update` divides the processor time of a recorded update, its file included, by
that of an update without a record (median of ratios). `sampled_seconds` is the time in which a
thread of the rollouts process writes its file.
"""

import statistics
import time
from dataclasses import replace

from benchmarks._measuring import ratio, rounds, say
from benchmarks.updating import batch_of, expert_rows, learning, parsed, with_advantages
from envs.episode import Example, StopReason
from rl.records import Credit, Group, Rollout
from rl.rollouts.sampled_tokens import TokenRecord
from rl.trainer.trained_tokens import StepRecord


def main() -> None:
    """Measure, then print one line."""
    asked = parsed()
    with learning(asked) as (run, run_folder, learner):
        rows = expert_rows(run, run_folder, asked.rows)
        rollouts = tuple(Rollout((row,), [], 0.0, {}, StopReason.STOP, 1, 0.0) for row in rows)
        credits = (Credit(0.0, (0.0,)),) * len(rows)
        group = Group(0, Example(0, "none", []), 0, rollouts, credits)
        everything = TokenRecord(num_groups=None)
        batch = batch_of(run, with_advantages(rows, 0.0))
        recorded = replace(batch, record_ids=everything.ids([group], [group]))

        def recorded_update() -> None:  # as a rank does
            record = StepRecord(recorded)
            learner.update(recorded, record.observe)
            record.write(run_folder, 0)

        works = {
            "off": lambda: learner.update(batch),
            "on": recorded_update,
            "sampled": lambda: everything.write(run_folder, 0, [group]),
        }
        # Other processes disturb the wall clock by some percent, so measure processor time.
        took = rounds(works, asked.repeats, time.process_time)
        size = sum(path.stat().st_size for path in run_folder.tokens.iterdir())
    tokens = sum(row.num_completion for row in rows)
    say(
        tokens=tokens,
        seconds=statistics.median(took["on"]),
        of_update=ratio(took["on"], took["off"]),
        sampled_seconds=statistics.median(took["sampled"]),
        bytes_per_token=size / tokens,
    )


if __name__ == "__main__":
    main()
