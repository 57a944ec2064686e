"""A token column that a user adds to rl/records.py and losses/tokens.py needs no other change."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from losses.tokens import Tokens
from rl.dry_call import rewards, tensors
from rl.records import Column, MicroBatch, TrainingRow


@dataclass(frozen=True, eq=False, kw_only=True)
class OddRow(TrainingRow):
    odd: Annotated[Any, Column(np.float32, fill=2)]


@dataclass(frozen=True, eq=False, kw_only=True)
class OddBatch(MicroBatch):
    odd: Annotated[Any, Column(np.float32, fill=2)]


@dataclass(frozen=True, eq=False, kw_only=True)
class OddTokens(Tokens):
    odd: Tensor


def test_a_new_token_column_is_made_up_like_every_other(monkeypatch):
    monkeypatch.setattr(rewards, "TrainingRow", OddRow)
    assert rewards.made_up_rollout(1.0, 2).rows[0].odd.tolist() == [2, 2, 2]
    monkeypatch.setattr(tensors, "MicroBatch", OddBatch)
    monkeypatch.setattr(tensors, "Tokens", OddTokens)
    tokens, *_ = tensors.made_up_tokens(has_old=False)
    assert tokens.odd.shape == tokens.turns.shape
