"""Rows: each is exactly what the engine saw and sampled, whatever the turns were."""

import numpy as np
import pytest

from rl.inference.completion import Completion
from rl.sampling.row_builder import RowBuilder
from tests.support.scripted import trained


def played(*turns):
    """Rows of (prompt, completion) turns: token t has logprob -t / 8, turn i version i + 5."""
    rows = RowBuilder()
    for i, (prompt, completion) in enumerate(turns):
        logprobs, versions = [-t / 8 for t in completion], [i + 5] * len(completion)
        rows.add_turn(Completion(completion, logprobs, versions, False, prompt))
    return rows


def test_turns_whose_prompts_extend_are_one_row_with_the_values_of_each_token():
    """The third turn forks, and the fourth extends the fork."""
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([9], [7, 8]), ([9, 7, 8, 5], [10])]
    first, second = played(*turns).freeze()
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trained(first) == [3, 4, 6]
    assert first.num_completion == 3
    assert first.rollout_logprobs.tolist() == [0, 0, -3 / 8, -4 / 8, 0, -6 / 8]
    assert first.token_versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert first.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert first.turns.dtype == np.int32
    assert (second.token_ids.tolist(), trained(second)) == ([9, 7, 8, 5, 10], [7, 8, 10])
    assert second.turns.tolist() == [-1, 2, 2, -1, 3]
    # An empty completion is nothing to train on.
    (row,) = played(([1, 2], [3]), ([7, 8], [])).freeze()
    assert row.token_ids.tolist() == [1, 2, 3]
    assert RowBuilder().freeze() == ()


def test_kept_tokens_stand_at_the_tokens_that_were_sampled_from_them():
    rows = RowBuilder()
    begun = Completion([3, 4], [0, -1], [-1, 5], False, [1, 2], num_masked=1, kept=[[], [4]])
    rows.add_turn(begun)
    rows.add_turn(Completion([6, 7], [-1, -1], [5, 5], False, [1, 2, 3, 4, 5], kept=[[6, 8], [7]]))
    rows.add_turn(Completion([2], [-1], [6], False, [9]))
    first, fork = rows.freeze()
    assert trained(first) == [4, 6, 7]
    assert first.kept.tolist() == [[4, -1], [6, 8], [7, -1]]
    assert first.kept.dtype == np.int32
    assert fork.kept is None


@pytest.mark.parametrize(
    "rewritten",
    [[1, 2, 3, 0, 5], [1, 2, 5], [1, 2, 3]],
    ids=["a token changed", "thinking dropped", "shorter than what was sampled"],
)
def test_a_prompt_that_rewrites_history_forks_and_trains_no_token_twice(rewritten):
    first, second = played(([1, 2], [3, 4]), (rewritten, [6, 7])).freeze()
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.completion_mask.tolist() == [False, False, True, True]
    assert second.token_ids.tolist() == [*rewritten, 6, 7]
    assert second.completion_mask.tolist() == [False] * len(rewritten) + [True, True]
    assert second.token_versions[-2:].tolist() == [6, 6]
