"""The learner around a stand-in policy, and the policy around a stand-in engine."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.records import MicroBatch


@pytest.fixture
def ranks():
    """A world of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield SimpleNamespace(device=torch.device("cpu"), first=True, world=1, any=bool)
    dist.destroy_process_group()


def micro(versions):
    shape = (1, len(versions))
    return MicroBatch(
        token_ids=np.zeros(shape, np.int32),
        completion_mask=np.array([versions]) >= 0,
        rollout_logprobs=np.zeros(shape, np.float32),
        advantages=np.ones(shape, np.float32),
        token_weights=np.ones(shape, np.float32),
        token_versions=np.array([versions], np.int32),
        turns=np.array([versions], np.int32).clip(max=0),
        rollout_ids=np.zeros(1, np.int32),
        first_positions=np.zeros(1, np.int32),
        row_numbers=np.zeros(1, np.int32),
    )


class Engine:
    """Logprobs of two tokens out of one weight."""

    def __init__(self, norm):
        self.weight = torch.tensor([1.0, 2.0], requires_grad=True)
        self.optimizer, self.norm = SimpleNamespace(param_groups=[]), norm
        self.module = nn.Module()  # without parameters, which DeepSpeed would handle

    def __call__(self, token_ids, mask, temperature, *, entropies, candidates):
        return -self.weight, self.weight.detach()

    def backward(self, value):
        value.backward()

    def step(self):
        pass

    def zero_optimization_stage(self):
        return 0

    def get_global_grad_norm(self):
        return self.norm


@pytest.mark.parametrize(
    ("world", "norm", "skipped"), [(1, 1.0, 0), (2, float("nan"), 1), (2, float("inf"), 1)]
)
def test_a_step_sums_over_ranks_compares_fresh_tokens_and_reports_a_skip(
    world, norm, skipped, ranks
):
    policy = Policy.__new__(Policy)
    ranks.world, policy.ranks = world, ranks
    policy.engine, policy._temperature = Engine(norm), 1.0
    batch = Batch.of(micro([-1, 3, 4]), ranks.device, 4)
    assert batch.staleness.tolist() == [1, 0]
    weights = torch.tensor([3.0, 5.0])
    batch = replace(batch, rollout_logprobs=torch.tensor([-9.0, -2.5]), token_weights=weights)
    objective = SimpleNamespace(per_token=lambda batch, logprobs, *_: (logprobs, {}))
    metrics = policy._update([batch], objective, 0.0, 1e-3, None)
    # DeepSpeed averages gradients over ranks, the objective is a sum.
    assert policy.engine.weight.grad.tolist() == [-3.0 * world, -5.0 * world]
    assert metrics["mismatch/sampled_mean_abs"] == pytest.approx(0.5)  # of version 4 alone
    assert metrics["train/skipped"] == skipped
