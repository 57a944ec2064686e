"""Logprobs among the tokens that top_p, top_k and min_p kept; N tokens, S kept tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.learner.logprobs import PolicyModule, Rows, kept_logprob
from tests.rl.learner.test_updates import initial, preparation, step_of, trained
from tests.support import tiny_policy as tiny
from tests.support.ranks import on_ranks, per_world

torch.set_num_threads(1)


def kept_with(token_ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return sets [N, 6] that contain each token [N]; every fourth token has none."""
    kept = torch.full((len(token_ids), 6), -1)
    generator = torch.Generator().manual_seed(seed)
    for i, token in enumerate(token_ids.tolist()):
        others = torch.randperm(250, generator=generator)
        size = (0, 1, 3, 6)[i % 4]
        kept[i, :size] = torch.cat([torch.tensor([token]), others[others != token]])[:size]
    return kept


def test_the_probability_of_a_set_by_hand():
    # p = 0.5, 0.2, 0.3; the sets {0, 2}, {1} and none: 0.8, 0.2 and all
    p = torch.tensor([[0.5, 0.3], [0.2, 0.5], [0.5, 0.5]], dtype=torch.float64)
    logprobs = p.log().requires_grad_()
    found = kept_logprob(torch.tensor([[0, 2], [1, -1], [-1, -1]]), logprobs)
    torch.testing.assert_close(found.exp(), torch.tensor([0.8, 0.2, 1.0], dtype=torch.float64))
    found.sum().backward()
    # d log(0.5 + 0.3) / d log 0.5 = 0.5 / 0.8
    expected = torch.tensor([[0.625, 0.375], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.model_folder(tmp_path_factory.mktemp("kept") / "model")


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("own_temperature", [False, True])
def test_value_and_gradient_are_those_of_masked_logits(folder, chunk, own_temperature):
    model = tiny.exact_model(folder)
    token_ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[:, 0] = mask[1, 5:] = False
    own = token_ids[mask]
    kept, candidates = kept_with(own), torch.stack([(own + 3) % 256, (own + 9) % 256], -1)
    steps = torch.linspace(0.5, 1.5, len(own), dtype=torch.float64)[:, None]
    temperature = steps if own_temperature else 0.7
    weights = torch.linspace(-1, 2, len(own), dtype=torch.float64)

    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1][mask[:, 1:]] / temperature
    full = logits.log_softmax(-1)
    expected = tiny.among(logits, kept).gather(-1, own[:, None])[:, 0]
    plain = torch.autograd.grad((weights * expected).sum(), list(model.parameters()))
    module = PolicyModule(model, chunk=chunk, kl_from_uniform=True)
    scored = module(token_ids, mask, temperature, entropies=True, candidates=candidates, kept=kept)
    logprobs, entropies, kl, of_candidates = scored
    torch.testing.assert_close(logprobs, expected, rtol=1e-10, atol=1e-10)
    # All other numbers are those of the full distribution.
    torch.testing.assert_close(of_candidates, full.gather(-1, candidates))
    torch.testing.assert_close(entropies, -(full.exp() * full).sum(-1))
    assert not kl.requires_grad
    torch.testing.assert_close(kl, -full.mean(-1) - math.log(full.shape[1]))
    alone, *others = module(token_ids, mask, temperature, kept=kept)
    torch.testing.assert_close(alone, logprobs, rtol=0, atol=0)
    assert others == [None]  # neither entropies nor divergences
    found = torch.autograd.grad((weights * logprobs).sum(), list(model.parameters()))
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)

    ignored = module(token_ids, mask, temperature)[0]
    has_set = kept[:, 0] >= 0
    assert ((logprobs - ignored)[has_set] > 1).all()
    torch.testing.assert_close(logprobs[~has_set], ignored[~has_set], rtol=0, atol=0)


def test_a_reference_leaves_out_kept_ids_for_which_it_has_no_logit(folder):
    # The policy may have more padding ids than the reference, and vLLM may keep one of them.
    module = PolicyModule(tiny.exact_model(folder), chunk=4)
    token_ids, mask = torch.tensor([[5, 9, 2]]), torch.tensor([[False, True, True]])
    more = module.head.out_features
    found = module(token_ids, mask, 1.0, kept=torch.tensor([[9, more, 3], [2, 4, more + 63]]))[0]
    expected = module(token_ids, mask, 1.0, kept=torch.tensor([[9, 3, -1], [2, 4, -1]]))[0]
    torch.testing.assert_close(found, expected)


def with_sets(rows):
    """Give every other row sets, of different sizes, as in a batch with demonstrations."""
    made = []
    for number, row in enumerate(rows):
        own = torch.tensor(row.token_ids[row.completion_mask])
        kept = kept_with(own, number)[:, : 6 - number % 3].numpy().astype(np.int32)
        made.append(replace(row, kept=kept if number % 2 and len(own) else None))
    return made


@per_world("mode", {1: ("zero0", "zero0 shared"), 2: ("zero0", "zero3")})
@on_ranks
def test_a_step_with_sets_is_that_of_plain_torch_in_every_split(setup, mode):
    rows = with_sets(setup.rows)
    policy, _ = trained(setup, mode)
    for split in ("one", "several", "rows"):
        before = setup.everywhere(policy)
        value, gradient = setup.plain(before, rows)
        stats = policy.update(setup.batch(rows, split), setup.objective)
        assert tiny.relative_error(step_of(before, setup.everywhere(policy)), gradient) < 1e-4
        assert stats["train/loss"] == pytest.approx(value, rel=1e-5)
    _, without = setup.plain(before, setup.rows)
    assert tiny.relative_error(without, gradient) > 0.1  # the sets matter


@pytest.mark.parametrize("world", [1])
@on_ranks
def test_old_and_reference_logprobs_have_the_sets_of_the_update(setup):
    policy, _ = trained(setup, "zero0")
    reference = initial(setup, policy)
    prepare = preparation(policy, keeps_old=True, reference=reference, beta=0.0)
    batches, _ = prepare(setup.batch(with_sets(setup.rows)), 0.0)
    for b in batches:
        scored, full = policy.with_scores(b), policy.with_scores(replace(b, kept=None))
        torch.testing.assert_close(b.old_logprobs, scored.logprobs)
        torch.testing.assert_close(scored.entropies, full.entropies)
        rows = Rows(b.token_ids, b.mask, b.envs)
        among, plain = reference.score([replace(rows, kept=b.kept), rows])
        torch.testing.assert_close(b.ref_logprobs, among.logprobs)
        if b.kept is not None:
            has_set = b.kept[:, 0] >= 0
            assert (b.old_logprobs[has_set] > full.logprobs[has_set]).all()
            assert (b.ref_logprobs[has_set] > plain.logprobs[has_set]).all()
    assert any(b.kept is not None for b in batches)
