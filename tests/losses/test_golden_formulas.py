"""Everything that the formulas compute with their shipped options, for fixed tokens and groups."""

import math
from functools import partial
from itertools import product

import torch

from losses.gae import gae
from losses.groups import ScoredGroup
from losses.kl import k1, k2, k3
from losses.squared_error import squared_error
from losses.tokens import Tokens
from rl.config.build import component
from tests.support.composing import CONF, chosen
from tests.support.golden import golden

torch.set_num_threads(1)

# log(pi / mu) of the tokens: within, at and beyond every clip, both clamps included.
GAPS = (0.0, 2e-4, -2e-4, 3.5e-4, 0.1, -0.15, 0.25, -0.3, 0.5, 1.0, -1.2, 2.5, -3.0, 22.0, -21.0)
GROUPS = {
    "mixed": ([0.0, 1.0, 1.0, 0.5], [(0.0,), (0.25, 0.75), (1.0, 0.0, 0.0), (0.0, 0.5)]),
    "unscored": ([None, 0.25, math.nan, 1.0, math.inf], [None, (0.25,), None, (0.5, 0.5), None]),
    "equal": ([0.5, 0.5 + 5e-7, 0.5], [(0.5,), (0.5 + 5e-7,), (0.25, 0.25)]),
    "almost equal": ([0.5, 0.500002], [(0.5,), (0.500002,)]),
    "negative": ([-1.0, 1.0, 3.0], [(-1.0,), (1.0,), (3.0,)]),
    "one scored": ([None, 0.7], [None, (0.7,)]),
    "empty": ([], []),
}


def made_tokens(*, old: bool) -> Tokens:
    """Return each gap with three advantages, in 8 sequences; a ninth sequence has no token."""
    gaps, advantages = map(torch.tensor, zip(*product(GAPS, (1.5, -0.75, 0.0)), strict=True))
    number = torch.arange(len(gaps))
    wave = torch.sin(number.double()).float()
    # The first four sequences have one gap each, the others mix gaps.
    ids, mu = torch.where(number < 12, number // 3, 4 + number % 4), -1.1 + wave
    shares = torch.stack([0.5 + 0.2 * wave, 0.2 - 0.1 * wave, 0.1 + 0 * wave], -1).log()
    return Tokens.by_hand(
        (mu + gaps).requires_grad_(), mu, advantages, sequence_ids=ids, num_sequences=9,
        staleness=number % 4, entropies=(number * 7 % 11) / 4, positions=number, turns=number // 9,
        rollout_ids=ids, group_ids=ids // 2, source=number % 3,
        old_logprobs=mu + 0.8 * gaps.clamp(-1, 1) + 0.1 * wave * (number > 5) if old else None,
        ref_logprobs=mu + gaps.clamp(-2, 2) - 0.4 * wave,
        candidate_logprobs=(shares - 0.3 * wave[:, None] ** 2).requires_grad_(),
        ref_candidate_logprobs=shares,
    )  # fmt: skip


def test_each_loss_with_its_shipped_options():
    """Loss, gradients and metrics of each token, without and with logprobs of an old policy."""
    found, seen = {}, {}
    for name, old in product(
        (path.stem for path in sorted(CONF.glob("loss/*.yaml"))), (False, True)
    ):
        node, tokens = chosen("loss", name), made_tokens(old=old)
        if (first := seen.setdefault(str(node), name)) != name:  # only its other groups differ
            found[name] = f"as {first}"
            continue
        loss = component(node)
        if hasattr(loss, "statistics"):
            loss = partial(loss, statistics=loss.statistics(tokens))
        result, leaves = loss(tokens), [tokens.logprobs, tokens.candidate_logprobs]
        grads = torch.autograd.grad(result.loss.sum(), leaves, materialize_grads=True)
        values = {"loss": result.loss, "grad": grads[0], "candidates": grads[1].sum(-1)}
        values |= result.metrics | {"clamped": result.ratio_clamped}
        found[f"{name}, old={old}"] = {k: v for k, v in values.items() if v is not None and v.any()}
    golden("losses/losses", found)


def test_corrections_estimators_and_critic_formulas():
    """Weights and metrics of each correction, k1 to k3 with gradients, GAE, the critic's loss."""
    tokens, found = made_tokens(old=True), {}
    for path in sorted(CONF.glob("correction/*.yaml")):
        given = tokens.old_logprobs, tokens.rollout_logprobs, tokens.sequence_ids, 9
        found[path.stem] = component(chosen("correction", path.stem))(*given)
    for estimator in (k1, k2, k3):
        values = estimator(tokens.logprobs, tokens.ref_logprobs)
        found[estimator.__name__] = [values, *torch.autograd.grad(values.sum(), [tokens.logprobs])]
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.0], [2.0, -1.0, 0.0, 0.0]])
    values = torch.tensor([[0.3, 0.2, -0.4, 0.1], [1.0, 0.5, 0.0, 0.0]])
    for gamma, lam in ((1.0, 1.0), (0.9, 0.5), (0.5, 0.0)):
        found[f"gae {gamma} {lam}"] = gae(rewards, values, gamma=gamma, gae_lambda=lam)
    for clip in (None, 0.2):
        critic = squared_error(values[0], rewards[0], values[0] + rewards[1], clip=clip)
        found[f"squared_error {clip}"] = critic
    golden("losses/corrections", found)


def test_advantages_and_aggregations():
    """Advantages of several groups, and token weights of six rollouts of four prompts."""
    found = {}
    for path, (group, (rewards, turns)) in product(
        sorted(CONF.glob("advantage/*.yaml")), GROUPS.items()
    ):
        scored = ScoredGroup.by_hand(rewards, turn_rewards=turns)
        discount = {"discount": 0.5} if "turn" in path.stem else {}
        try:
            value = component(chosen("advantage", path.stem) | discount)(scored)
        except ValueError as error:
            value = str(error)
        found[f"{path.stem}: {group}"] = value
    for path in sorted(CONF.glob("aggregation/*.yaml")):
        lengths = [[2, 3], [0, 0], [7], [0, 4], [1], [0]]
        lengths = lengths if path.stem == "turn_mean" else list(map(sum, lengths))
        length = {"length": 10} if path.stem == "constant_length" else {}
        made = component(chosen("aggregation", path.stem) | length)
        found[path.stem] = made(lengths, [0, 0, 1, 1, 2, 3])
    golden("losses/advantages", found)
