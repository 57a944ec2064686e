"""What DeepSpeed makes of a batch, compared with plain torch; the last tests are of adapters."""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from losses.aggregation import token_mean
from losses.tokens import TokenLoss
from rl.learner.logprobs import Rows
from rl.learner.objective import Batch, Objective
from rl.learner.optim import Muon
from rl.rollouts.plan import weighted_rows
from tests.rl.learner.test_updates import initial
from tests.support import tiny_policy
from tests.support.policy_setup import BUDGETS, RATE, PlainSteps, adapted, all_same, same
from tests.support.ranks import on_ranks, per_world
from tests.support.tiny_policy import flat, relative_error

# Recomputed and compiled layers occur with some stages only: a compiled case takes 15 s or more.
SPLIT = ("zero0", "zero1", "zero2", "zero3 scattered", "zero3_offload scattered")
UPDATES = {  # mode, adapter
    1: (
        *((mode, False) for mode in ("zero2 checkpointing compiled", "zero0 shared")),
        *((mode, True) for mode in ("zero0 checkpointing", "zero3 shared compiled")),
    ),
    2: (
        *((mode, False) for mode in (*SPLIT, "zero3 scattered shared checkpointing")),
        *((m, True) for m in ("zero1", "zero3 scattered checkpointing", "zero2 shared")),
    ),
}
STEPS = {
    1: (
        *(("float32", mode) for mode in ("zero0", "zero3")),
        *(("bfloat16", mode) for mode in ("zero2", "zero3_offload_optimizer")),
    ),
    2: (
        *(("float32", mode) for mode in ("zero1", "zero3 scattered")),
        *(("bfloat16", m) for m in ("zero0", "zero2", "zero3", "zero3_offload", "zero1 sums")),
    ),
}
steps = per_world("dtype, mode", STEPS)
ADAPTED = {  # the modes of policies with an adapter: dtype, how, modules_to_save
    1: (("float32", "zero0", ()), ("bfloat16", "zero0", ("model.norm",))),
    2: (
        ("float32", "zero1", ("model.norm",)),
        ("bfloat16", "zero2", ()),
        ("bfloat16", "zero3", ("model.norm",)),
        ("float32", "zero3 scattered", ()),
    ),
}


def without_advantage(row):
    return replace(row, advantages=0 * row.advantages)


def forked_rows(rows):
    """Return rows with few different tokens, so that many begin alike, and two equal rows."""
    # The advantages are small, because the policy moves by the whole gradient and must stay random.
    few = [
        replace(row, token_ids=row.token_ids % 3, advantages=row.advantages / 40) for row in rows
    ]
    longest = max(few, key=lambda row: row.length)
    return [*few, longest, without_advantage(longest)]


@per_world("mode, adapter", UPDATES)
@on_ranks
def test_the_update_is_the_gradient_of_the_whole_batch_however_it_is_split(setup, mode, adapter):
    setup, shared = adapted(setup) if adapter else setup, "shared" in mode
    optim, rows = PlainSteps(), forked_rows(setup.rows) if shared else setup.rows
    policy = setup.policy("float32", mode, optim)
    before = setup.everywhere(policy)
    idle_rows = [*rows[:5], *map(without_advantage, rows[5:])]
    num_idle = sum(row.num_completion for row in idle_rows if not row.has_advantage)
    fraction = num_idle / sum(row.num_completion for row in idle_rows)
    assert 0.3 < fraction < 0.9
    micro_batches = dict(zip(BUDGETS, (1, *([3, 12], [2, 6])[setup.ranks.world - 1]), strict=True))
    # "lone": with two ranks, the second has nothing to do.
    given = {"lone": rows[:1], **dict.fromkeys(BUDGETS, rows), "idle": idle_rows}
    for split, some in given.items():
        value, gradient = setup.plain(before, some)
        batch = setup.split(some, BUDGETS.get(split, 1), shared=shared and split != "several")
        taken = optim.made.steps
        stats = policy.update(batch, setup.objective)
        after = setup.everywhere(policy)
        update = {name: before[name].double() - after[name].double() for name in before}
        before, norm = after, float(flat(gradient).norm())
        if split in micro_batches and not shared:
            assert len(batch.micro_batches) == micro_batches[split]
        assert norm > 0.01
        # Rounding of the weights to float32 moves the update by about 1e-6.
        assert relative_error(update, gradient) < 1e-5 + 1e-6 / norm, split
        assert stats["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert stats["train/loss"] == pytest.approx(value, rel=1e-4)
        assert optim.made.steps == taken + 1
        # Rows without a gradient are not run backwards.
        if split in ("lone", "idle") or not shared:
            expected = fraction if split == "idle" else 0
            assert stats["train/zero_gradient_fraction"] == pytest.approx(expected)
    stats = policy.update(setup.batch(list(map(without_advantage, rows))), setup.objective)
    assert all_same(before, setup.everywhere(policy))
    assert stats["train/grad_norm"] == 0


@per_world("mode", {2: SPLIT})
@on_ranks
def test_a_long_gradient_is_clipped_and_its_length_reported(setup, mode):
    policy = setup.policy("float32", mode, PlainSteps(), max_grad_norm=0.5)
    before = setup.everywhere(policy)
    stats = policy.update(setup.batch(setup.rows), setup.objective)
    assert stats["train/grad_norm"] > 5
    update = flat(setup.everywhere(policy)) - flat(before)
    assert float(update.norm()) == pytest.approx(0.5, rel=1e-5)


@per_world("mode", {1: ("zero1", "zero3"), 2: ("zero0", "zero2", "zero3")})
@on_ranks
def test_no_number_of_bfloat16_micro_batches_loses_a_part_of_the_gradient(setup, mode):
    optim, groups = PlainSteps(0.0), tiny_policy.groups(setup.twin, num_groups=8, seed=3)
    rows = [
        row for row in weighted_rows(groups, token_mean) if row.num_completion and row.has_advantage
    ][:16]
    policy = setup.policy("bfloat16", mode, optim)
    gradients = []
    for budget, count in ((10**6, setup.ranks.world), (1, 16)):
        batch = setup.split(rows, budget)
        assert len(batch.micro_batches) * setup.ranks.world == count
        policy.update(batch, setup.objective)
        gradients.append(optim.made.gradient)
    # The rest, 3.5e-4, is activations and the norms' gradients (docs/experiments.md). With
    # gradients of weights in bfloat16 the difference would be 3e-3.
    assert setup.difference(*gradients) < 1e-3
    # Every pass rounds to bfloat16, so only the very same passes can be compared exactly.
    total = torch.zeros_like(gradients[1])
    for micro in batch.micro_batches:
        policy.update(replace(batch, micro_batches=(micro,)), setup.objective)
        total += optim.made.gradient
    assert setup.difference(gradients[1], total) < 1e-5  # added up in bfloat16: about 1e-2


@steps
@on_ranks
def test_an_exported_model_loads_in_transformers_with_the_same_logits(setup, dtype, mode):
    policy, folder = setup.policy(dtype, mode, setup.adamw()), setup.new_folder()
    named = dict(setup.model(dtype, 0).named_parameters()) if setup.ranks.first else {}
    assert all_same(policy.weights(), named)  # the tied ones once
    policy.update(setup.batch(setup.rows), setup.objective)
    policy.export(folder, setup.sources[dtype])
    weights = setup.everywhere(policy)
    if not setup.ranks.first:
        return
    twin = setup.model(dtype, 1)
    twin.load_state_dict(weights, strict=False)
    twin.set_attn_implementation("sdpa")  # the default of transformers
    read: Any = AutoModelForCausalLM.from_pretrained
    loaded, report = read(folder, dtype="auto", output_loading_info=True)
    token_ids = torch.tensor(setup.batch(setup.rows).micro_batches[0].token_ids).long()
    with torch.no_grad():
        expected, found = (m(token_ids).logits for m in (twin.eval(), loaded.eval()))
    assert same(expected, found)
    assert str(found.dtype) == f"torch.{dtype}"
    assert not any(report.values())
    assert AutoTokenizer.from_pretrained(folder).decode([104, 105]) == "hi"


MUON = (("float32", "zero0 muon"), ("bfloat16", "zero0 muon"))
LOADED_ADAPTERS = {1: ADAPTED[1][:1], 2: [c for c in ADAPTED[2] if c[1] in ("zero1", "zero3")]}
LOADED = {w: [*((*c, None) for c in (*STEPS[w], *MUON)), *LOADED_ADAPTERS[w]] for w in STEPS}


@per_world("dtype, mode, saved", LOADED)
@on_ranks
def test_a_loaded_policy_and_one_that_skipped_bad_batches_take_the_same_next_step(
    setup, dtype, mode, saved
):
    setup = setup if saved is None else adapted(setup, saved)
    first, second = (setup.batch(rows) for rows in setup.batches)
    optim, folder = setup.adamw(schedule="linear", warmup_steps=2), setup.new_folder()
    if "muon" in mode:
        optim = Muon(**vars(optim), momentum=0.9, nesterov=True, ns_steps=5, adamw_ratio=0.5)
    policy = setup.policy(dtype, mode, optim)
    start = setup.everywhere(policy)
    stats = policy.update(first, setup.objective)
    assert stats["train/learning_rate"] == RATE / 2
    middle = setup.everywhere(policy)
    # Adam has no past at its first step, so the update is as long as the rate of that step.
    rounding = 1e-4 if dtype == "float32" else 0.05
    moved = float((flat(middle) - flat(start)).abs().median())
    if "muon" not in mode:
        assert moved == pytest.approx(RATE / 2, rel=rounding)
    policy.save(folder)
    policy.update(second, setup.objective)
    end = setup.everywhere(policy)

    loaded = setup.policy(dtype, mode, optim, seed=1)
    assert not all_same(setup.everywhere(loaded), middle)
    loaded.load(folder)
    assert all_same(setup.everywhere(loaded), middle)
    for name, batch, objective in bad_batches(setup, first):
        stats = loaded.update(batch, objective)
        assert all_same(setup.everywhere(loaded), middle), name
        assert stats["train/skipped"] == 1
        assert math.isnan(stats["train/grad_norm"])
    # A batch in which nothing trains moves no momentum either.
    stats = loaded.update(setup.batch([]), setup.objective)
    assert all_same(setup.everywhere(loaded), middle)
    names = ("empty", "skipped", "grad_norm", "loss")
    assert [stats[f"train/{name}"] for name in names] == [1, 0, 0, 0]
    stats = loaded.update(second, setup.objective)
    assert all_same(setup.everywhere(loaded), end)
    assert (stats["train/empty"], stats["train/skipped"]) == (0, 0)


def bad_batches(setup, first):
    """Yield batches with NaN in a short or a long row, and losses of infinite value or gradient."""
    steep = Objective(lambda t: TokenLoss((t.logprobs - t.logprobs.detach()).sqrt(), {}))
    high = Objective(lambda t: TokenLoss(t.logprobs + math.inf, {}))
    counted = [i for i, r in enumerate(setup.rows) if r.num_completion]
    lengths = sorted(counted, key=lambda i: setup.rows[i].length)
    for spoilt, split in ((lengths[1], "several"), (lengths[-1], "rows")):
        rows = list(setup.rows)
        rows[spoilt] = replace(rows[spoilt], advantages=math.nan * rows[spoilt].advantages)
        yield f"nan, {split}", setup.batch(rows, split), setup.objective
    yield "steep", first, steep
    yield "high", first, high


@per_world("mode", {w: [m for dtype, m in STEPS[w] if dtype == "bfloat16"] for w in STEPS})
@on_ranks
def test_updates_too_small_for_bfloat16_add_up_in_float32(setup, mode):
    """Updates of 1.5e-3 to weights of 1, whose neighbours in bfloat16 are 4e-3 and 8e-3 away."""
    policy = setup.policy("bfloat16", mode, setup.adamw(learning_rate=1.5e-3))
    moved = []
    for _ in range(5):
        policy.update(setup.batch(setup.rows), setup.objective)
        norms = [w for name, w in setup.everywhere(policy).items() if "norm" in name]
        moved.append(sum(int((w != 1).sum()) for w in norms) / sum(w.numel() for w in norms))
    assert moved[0] == 0
    assert moved[-1] > 0.5


adapters = per_world("dtype, mode, saved", ADAPTED)


@functools.cache
def trained_adapter(setup, dtype, mode):
    """Return a policy with an adapter after one step, which several tests read."""
    policy = setup.policy(dtype, mode, setup.adamw())
    policy.update(setup.batch(setup.rows), setup.objective)
    return policy


class Written:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@per_world("mode", {1: ["zero0", "zero2", "zero3"]})
@on_ranks
def test_a_checkpoint_with_code_or_without_a_trained_weight_is_refused(setup, mode):
    setup = adapted(setup)
    policy, folder = setup.policy("float32", mode, setup.adamw()), setup.new_folder()
    policy.update(setup.batch(setup.rows), setup.objective)
    policy.save(folder)
    files, code_ran = sorted((folder / "deepspeed").iterdir()), folder / "code ran"
    assert len(files) == 1 + (mode != "zero0")
    for file in files:
        whole, state = file.read_bytes(), torch.load(file, weights_only=False)
        torch.save({**state, "more": Written(code_ran)}, file)
        refused = rf"^\S*{file.name} is not loaded, .* contains unsafe code: remove its"
        with pytest.raises(ValueError, match=refused):
            policy.load(folder)
        assert not code_ran.exists()
        file.write_bytes(whole)
    policy.load(folder)
    (path,) = (folder / "deepspeed").glob("*model_states.pt")
    state = torch.load(path, weights_only=False)
    assert all("lora_" in name for name in state["module"])  # nothing that is not trained
    assert not state.get("frozen_param_fragments")
    name = next(iter(state["module"]))
    del state["module"][name]
    torch.save(state, path)
    with pytest.raises(RuntimeError, match=re.escape(name)):
        policy.load(folder)
    with pytest.raises(ValueError, match="lacks DeepSpeed's files: restore them, or delete the"):
        policy.load(setup.new_folder())


@adapters
@on_ranks
def test_both_exports_have_the_logprobs_of_the_policy(setup, dtype, mode, saved):
    setup = adapted(setup, saved)
    policy, folder = trained_adapter(setup, dtype, mode), setup.new_folder()
    source = setup.sources[dtype]
    whole = Path(copytree(source, folder / f"whole{setup.ranks.rank}"))
    # Not by save_pretrained, which writes on the first rank alone.
    weights = dict(setup.base(dtype).named_parameters())
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    policy.export(folder / "hf", whole)
    policy.export(folder / "merged", whole, merged=True)
    policy.export(folder / "alone", source)  # a config without weights
    token_ids = setup.batch(setup.rows).micro_batches[0].token_ids
    own = policy.logprobs(token_ids)
    if not setup.ranks.first:
        return
    base = setup.base(dtype)
    loaded = PeftModel.from_pretrained(base, folder / "hf", autocast_adapter_dtype=False)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="auto")
    # In bfloat16 another attention kernel rounds otherwise, and so does merging.
    assert gap(loaded, token_ids, own) < (1e-5 if dtype == "float32" else 0.03)
    assert gap(merged, token_ids, own) < (2e-5 if dtype == "float32" else 0.1)
    assert str(merged.dtype) == f"torch.{dtype}"
    assert AutoTokenizer.from_pretrained(folder / "hf").decode([104, 105]) == "hi"
    # Without its base, which exists nowhere else, an adapter would be lost.
    found = {name: (folder / name / "adapter_config.json").exists() for name in ("hf", "alone")}
    assert found == {"hf": True, "alone": False}
    assert (folder / "alone" / "model.safetensors").exists()


@torch.no_grad()
def gap(model, token_ids, own):
    tokens = torch.tensor(token_ids).long()
    logprobs = torch.log_softmax(model.eval()(tokens).logits[:, :-1].float(), -1)
    plain = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((plain - own[:, 1:]).abs().max())


@pytest.mark.parametrize("world", [1])
@on_ranks
def test_dropout_is_in_the_update_and_not_in_logprobs(setup):
    batch = setup.batch(setup.rows)
    policy, plain = (
        adapted(setup, (), dropout).policy("bfloat16", "zero0", PlainSteps())
        for dropout in (0.5, 0.0)
    )
    own, expected = (p.logprobs(batch.micro_batches[0].token_ids) for p in (policy, plain))
    assert torch.equal(own, expected)
    felt, expected = (p.update(batch, setup.objective)["train/loss"] for p in (policy, plain))
    assert felt != expected


@adapters
@on_ranks
def test_with_its_adapter_off_a_trained_policy_is_the_model_it_began_as(setup, dtype, mode, saved):
    """So the base is the reference of a divergence, without a second copy."""
    policy = trained_adapter(adapted(setup, saved), dtype, mode)
    batch = Batch.of(setup.batch(setup.rows).micro_batches[0], setup.ranks.device, 0)
    off, on = policy.base_scores(batch).logprobs, policy.score(batch)
    plain = setup.policy(dtype, mode, PlainSteps())
    assert torch.equal(off, plain.score(batch))
    assert (off - on).abs().max() > 0.01
    own = batch.token_ids[batch.mask][:, None]
    kept, warm = torch.cat([own, (own + 1) % 256], -1), torch.linspace(0.5, 2.0, len(own))[:, None]
    rows = Rows(batch.token_ids, batch.mask, batch.envs, warm, kept)
    (found,) = initial(setup, policy, reads_candidates=True).score([rows])
    likeliest = plain._score(rows, top_k=(3, policy.vocabulary))
    for one, other in zip(vars(found).values(), (likeliest[0], *likeliest[2:]), strict=True):
        assert torch.equal(one, other)
