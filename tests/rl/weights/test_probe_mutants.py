"""The probe compares each token with itself: every token has another logprob here."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.run.failure import RunFailed
from rl.weights.pusher import WeightPusher, WeightSync

TOKENS = np.array([[5, 6, 9, 8, 2], [5, 7, 3, 0, 0]], np.int32)
CHOSEN = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], np.bool_)


def probed(off_by: float, max_mismatch: float = 0.5) -> tuple[dict[str, float], list[list[int]]]:
    """What the probe says of an engine whose logprobs are `off_by`, and what it was asked."""
    policy = SimpleNamespace(
        ranks=SimpleNamespace(first=True, any=bool),
        logprobs=lambda token_ids: -torch.tensor(token_ids) / 10,
    )
    asked: list[list[int]] = []

    def score(served_as, token_ids):
        asked.append(token_ids)
        return [-token / 10 + off_by for token in token_ids[1:]]

    sync = WeightSync(transport="shm", probe_every=1, probe_rows=2, max_mismatch=max_mismatch)
    pusher = WeightPusher(sync, "shm", SimpleNamespace(parent=None), timeout=1.0)
    pusher._vllm = SimpleNamespace(score=score)
    batch = SimpleNamespace(token_ids=TOKENS, completion_mask=CHOSEN)
    return pusher.probe(policy, batch, 1), sorted(asked)


def test_an_engine_that_agrees_token_by_token_has_no_mismatch():
    found, asked = probed(0.0)
    assert found["mismatch/max_abs"] == pytest.approx(0.0, abs=1e-6)
    assert asked == [[5, 6, 9, 8], [5, 7]]


def test_an_engine_that_is_off_is_off_by_as_much_and_too_much_ends_the_run():
    assert probed(0.25)[0]["mismatch/mean_abs"] == pytest.approx(0.25)
    with pytest.raises(RunFailed, match="trainer and vLLM disagree on"):
        probed(0.25, max_mismatch=0.2)
