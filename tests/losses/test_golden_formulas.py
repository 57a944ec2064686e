"""Everything that the losses compute with their shipped options, for fixed tokens."""

from functools import partial
from itertools import product

import torch

from losses.tokens import Tokens
from rl.config.build import component
from tests.support.composing import CONF, chosen
from tests.support.golden import golden

torch.set_num_threads(1)

# log(pi / mu) of the tokens: within, at and beyond every clip, both clamps included.
GAPS = (0.0, 2e-4, -2e-4, 3.5e-4, 0.1, -0.15, 0.25, -0.3, 0.5, 1.0, -1.2, 2.5, -3.0, 22.0, -21.0)


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
