"""Assert the guarantees of a run with record=all, token by token, after any process was killed."""

import json
from itertools import pairwise

import numpy as np

from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import Row, read_metrics
from rl.runtime.token_files import read_rows

MOST_MISMATCH = 0.02  # mean |logprob difference| of trainer and vLLM with the same weights


def nothing_is_lost_or_trained_twice(folder: RunFolder) -> int:
    """Assert it for steps, groups and examples; return the number of rollouts."""
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
    assert sorted(trained) == list(range(len(trained)))  # no group is missing
    assert all(len(of) == 1 for of in examples.values())
    if len(trained) <= run.env.get("num_train", 0):  # in the first pass each example occurs once
        assert len(set.union(*examples.values())) == len(trained)
    return len(trained) * run.group_size


def every_token_has_a_version_that_may_be_trained(
    folder: RunFolder, most_mismatch: float = MOST_MISMATCH
) -> dict[int, int]:
    """Assert it; returns the number of tokens by how many versions old they were."""
    oldest = Run.load(folder.config).sampler.max_staleness
    ages = dict.fromkeys(range(oldest + 1), 0)
    for line in _trained(folder):
        num_tokens, gaps = 0, []
        rows = read_rows(folder, line["step"])
        for row in (row for row in rows if row.update == 0):
            mask = row.columns["mask"]
            versions = row.columns["version"][mask]
            for version in versions:
                ages[line["step"] - int(version)] += 1  # KeyError: too old, or a future version
            num_tokens += len(versions)
            # The trainer's logprobs confirm the claimed version. Skip rows that were
            # in flight at a push, because their key-values come from the old weights.
            if row.trained and (versions == line["step"]).all():
                gaps.append(abs(row.columns["mu"][mask] - row.columns["pi"][mask]))
        assert num_tokens
        assert not gaps or np.concatenate(gaps).mean() < most_mismatch
    return ages


def _trained(folder: RunFolder) -> list[Row]:
    """Return the lines of steps, without the line of the last evaluation."""
    return [line for line in read_metrics(folder) if "train/loss" in line]
