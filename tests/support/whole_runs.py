"""What must be true of every run with record=all, whatever was killed: asserted token by token.

python -m tests.support.whole_runs outputs/<run> ...        one JSON line each
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from rl.config.schema import Run
from rl.run.folder import RunFolder
from rl.run.metrics import Row, read_metrics
from rl.run.token_files import read_rows

MOST_MISMATCH = 0.02  # mean |logprob difference| of trainer and vLLM with the same weights


def nothing_is_lost_or_trained_twice(folder: RunFolder) -> int:
    """Assert it of steps, groups and their examples; returns the number of rollouts."""
    run, lines = Run.load(folder.config), _trained(folder)
    steps = [line["step"] for line in lines]
    assert all(later == step + 1 for step, later in pairwise(steps))
    trained: dict[int, list[int]] = {}
    examples: dict[int, set[str]] = {}
    for step in steps:
        written = map(json.loads, folder.rollouts_of(step).read_text().splitlines())
        rollouts = [line for line in written if line["used"]]
        assert len(rollouts) == run.batch_size
        assert [line["error"] for line in rollouts] == [""] * run.batch_size
        for line in rollouts:
            trained.setdefault(line["group"], []).append(step)
            examples.setdefault(line["group"], set()).add(line["example"])
    assert all(len(of) == run.group_size and len(set(of)) == 1 for of in trained.values())
    assert sorted(trained) == list(range(len(trained)))  # none is missing in between
    assert all(len(of) == 1 for of in examples.values())
    if len(trained) <= run.env.get("num_train", 0):  # the first pass: each example once
        assert len(set.union(*examples.values())) == len(trained)
    return len(trained) * run.group_size


def every_token_has_a_version_that_may_be_trained(folder: RunFolder) -> dict[int, int]:
    """Assert it; returns the number of tokens by how many versions old they were."""
    oldest = Run.load(folder.config).sampler["max_staleness"]
    ages = dict.fromkeys(range(oldest + 1), 0)
    for line in _trained(folder):
        num_tokens, gaps = 0, []
        for row in read_rows(folder, line["step"]):
            mask = row.columns["mask"]
            versions = row.columns["version"][mask]
            for version in versions:
                ages[line["step"] - int(version)] += 1  # KeyError: too old, or of the future
            num_tokens += len(versions)
            # That they are what they claim say the trainer's own logprobs of that version. A row
            # that was in flight at a push has key-values of the weights before: it says nothing.
            if row.trained and (versions == line["step"]).all():
                gaps.append(abs(row.columns["mu"][mask] - row.columns["pi"][mask]))
        assert num_tokens
        assert not gaps or np.concatenate(gaps).mean() < MOST_MISMATCH
    return ages


def _trained(folder: RunFolder) -> list[Row]:
    """Lines of steps; the last evaluation has one to itself."""
    return [line for line in read_metrics(folder) if "train/loss" in line]


def main(paths: Sequence[str]) -> None:
    """Check these runs and say what they held."""
    for path in paths:
        folder = RunFolder(Path(path))
        held = {
            "run": path,
            "rollouts": nothing_is_lost_or_trained_twice(folder),
            "tokens_by_age": every_token_has_a_version_that_may_be_trained(folder),
        }
        print(json.dumps(held), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
