"""Value and gradient of the objective do not depend on how the batch is split, in float64."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
import torch
import yaml

from losses import aggregation
from losses.cispo import cispo
from losses.gspo import gspo
from losses.ppo_clip import ppo_clip
from losses.tokens import TokenLoss
from rl.logprobs import PolicyModule
from rl.objective import Batch, Objective
from rl.plan import plan, weigh
from rl.records import MicroBatch

torch.set_num_threads(1)

CONF = Path(__file__).parents[2] / "conf"
AGGREGATIONS = {
    "token_mean": aggregation.token_mean,
    "sequence_mean": aggregation.sequence_mean,
    "constant_length": partial(aggregation.constant_length, length=17),
    "prompt_mean": aggregation.prompt_mean,
}
LOSSES = {"cispo": cispo, "ppo_clip": ppo_clip, "gspo": gspo}
COMBINATIONS = [
    *((loss, name) for loss in ("cispo", "ppo_clip") for name in AGGREGATIONS),
    ("gspo", "sequence_mean"),
]
SPLITS = [(1, 10_000), (1, 60), (1, 1), (2, 45), (3, 30), (3, 1)]  # ranks, tokens_per_micro_batch


def shipped(name):
    """The loss with the knobs of its YAML."""
    node = yaml.safe_load((CONF / f"loss/{name}.yaml").read_text())
    knobs = {k: v for k, v in node.items() if k not in ("_target_", "defaults")}
    return partial(LOSSES[name], **knobs)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_policy.model_folder(tmp_path_factory.mktemp("objective") / "model")
    return tiny_policy.exact_model(folder)


@pytest.fixture(scope="module")
def groups(model):
    return tiny_policy.groups(model)


def in_parts(model, rows, token_loss, *, ranks, budget):
    """Value and gradient, summed over micro-batches and ranks by hand."""
    module, objective = PolicyModule(model, chunk=7), Objective(token_loss)
    model.zero_grad()
    total, count = 0.0, 0
    shares = plan(rows, step=0, ranks=ranks, tokens_per_micro_batch=budget, metrics={})
    for micro in (micro for share in shares for micro in share.micro_batches):
        batch = Batch.of(micro, torch.device("cpu"))
        logprobs, entropies = module(batch.token_ids, batch.mask, tiny_policy.TEMPERATURE)
        value, metrics = objective(batch, logprobs, entropies)
        value.backward()
        total += float(value.detach())
        count += 1
        assert all(m.shape == logprobs.shape and not m.requires_grad for m in metrics.values())
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    return total, gradient, count


@pytest.mark.parametrize(("loss", "weights"), COMBINATIONS)
def test_value_and_gradient_are_the_same_for_every_split_and_order(model, groups, loss, weights):
    rows = weigh(groups, AGGREGATIONS[weights])
    value, gradient = tiny_policy.reference(model, rows, shipped(loss))
    assert tiny_policy.flat(gradient).norm() > 0.01
    counts = set()
    for seed, (ranks, budget) in enumerate(SPLITS):
        shuffled = random.Random(seed).sample(groups, len(groups))
        rows = weigh(shuffled, AGGREGATIONS[weights])
        total, found, count = in_parts(model, rows, shipped(loss), ranks=ranks, budget=budget)
        assert total == pytest.approx(value, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
        counts.add(count)
    assert len(counts) > 3


def test_two_rows_by_hand():
    """Weights 0.5 and 0.25, advantages 2 and -4, loss = -advantage * logprob."""
    micro = MicroBatch(
        token_ids=np.array([[1, 2, 3], [4, 5, 0]], np.int32),
        completion_mask=np.array([[False, True, True], [False, True, False]]),
        rollout_logprobs=np.array([[0, -1, -2], [0, -3, 0]], np.float32),
        advantages=np.array([2, -4], np.float32),
        token_weights=np.array([0.5, 0.25], np.float32),
        token_versions=np.array([[-1, 6, 7], [-1, 7, -1]], np.int32),
        rollout_ids=np.array([4, 2], np.int32),
    )
    batch = Batch.of(micro, torch.device("cpu"))
    assert batch.token_versions.tolist() == [6, 7, 7]
    assert batch.sequence_ids.tolist() == [0, 0, 1]
    assert batch.rollout_ids.tolist() == [4, 4, 2]
    logprobs = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    seen = []

    def reinforce(tokens):
        seen.append(tokens)
        return TokenLoss(-tokens.advantages * tokens.logprobs, {"ones": torch.ones(3)})

    value, metrics = Objective(reinforce)(batch, logprobs, torch.zeros(3))
    value.backward()
    # 0.5 * 2 * 1 + 0.5 * 2 * 1 + 0.25 * -4 * 2
    assert value.item() == 0.0
    assert logprobs.grad.tolist() == [-1.0, -1.0, 1.0]
    assert seen[0].num_sequences == 2
    assert seen[0].rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert metrics["ones"].tolist() == [1, 1, 1]
    assert metrics["ratio_clamped"].tolist() == [0, 0, 0]
    # k3 of log(pi / mu) = 0, 1, 1: e - 1 - 1
    expected = torch.tensor([0.0, np.e - 2, np.e - 2], dtype=torch.float32)
    torch.testing.assert_close(metrics["kl_to_rollout"], expected)


def test_numbers_outside_of_the_completion_reach_neither_value_nor_gradient(model, groups):
    rows = weigh(groups, aggregation.token_mean)
    (share,) = plan(rows, step=0, ranks=1, tokens_per_micro_batch=10_000, metrics={})
    (micro,) = share.micro_batches
    outside = ~micro.completion_mask
    spoilt_logprobs = np.where(outside, np.nan, micro.rollout_logprobs)
    beyond = np.cumsum(micro.completion_mask[:, ::-1], axis=1)[:, ::-1] == 0  # after the last one
    spoilt_ids = np.where(beyond, 99, micro.token_ids)
    empty = ~micro.completion_mask.any(axis=1)
    assert empty.any()
    spoilt = MicroBatch(
        **{
            **{name: getattr(micro, name) for name in micro.__dataclass_fields__},
            "token_ids": spoilt_ids,
            "rollout_logprobs": spoilt_logprobs,
            "advantages": np.where(empty, np.nan, micro.advantages),
        }
    )
    results = []
    for each in (micro, spoilt):
        batch = Batch.of(each, torch.device("cpu"))
        module = PolicyModule(model, chunk=7)
        model.zero_grad()
        logprobs, entropies = module(batch.token_ids, batch.mask, 1.0)
        value, _ = Objective(shipped("cispo"))(batch, logprobs, entropies)
        value.backward()
        results.append(
            (float(value.detach()), {n: p.grad.clone() for n, p in model.named_parameters()})
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)
