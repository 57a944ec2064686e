"""LoRA under every ZeRO stage, compared with plain torch and peft."""

import functools
from pathlib import Path
from shutil import copytree

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.learner.objective import Batch
from rl.model.lora import LoRA, adapter_weights
from tests.support.policy_setup import PlainSteps, Setup, all_same
from tests.support.ranks import on_ranks, per_world
from tests.support.tiny_policy import exact_model, reference, relative_error

KEPT = {  # dtype, how, modules_to_save
    1: (("float32", "zero0", ()), ("bfloat16", "zero0", ("model.norm",))),
    2: (
        ("float32", "zero1", ("model.norm",)),
        ("bfloat16", "zero2", ()),
        ("bfloat16", "zero3", ("model.norm",)),
        ("float32", "zero3 scattered", ()),
    ),
}
kept = per_world("dtype, mode, saved", KEPT)


class Adapted(Setup):
    """Policies with an adapter that is not zero."""

    def __init__(self, folder, ranks, saved, dropout):
        super().__init__(folder, ranks)
        self.saved, self.dropout = list(saved), dropout

    def model(self, dtype, seed):
        return self.adapted(self.base(dtype), seed)

    def base(self, dtype):
        return super().model(dtype, 0)

    def adapted(self, model, seed):
        knobs = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "rslora": False}
        adapter = LoRA(**knobs, dropout=self.dropout, modules_to_save=self.saved)
        model = adapter.attach(model, seed, str(self.sources["float32"]))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += 0.1 * noise.to(parameter.dtype)
        return model

    def everywhere(self, policy):
        return self.from_first({n: t.clone() for n, t in policy.adapter_weights().items()})


@functools.cache
def adapted(setup, saved=(), dropout=0.0):
    return Adapted(setup.new_folder(), setup.ranks, saved, dropout)


@per_world(
    "mode",
    {
        1: ("zero0", "zero0 checkpointing compiled"),
        2: ("zero0", "zero1", "zero2", "zero3", "zero3 scattered checkpointing"),
    },
)
@on_ranks
def test_the_update_of_the_adapter_is_its_gradient_however_the_batch_is_split(setup, mode):
    setup = adapted(setup)
    twin = setup.adapted(exact_model(setup.sources["float32"]), 0)
    trained = {recipe.name: recipe.parts[0] for recipe in adapter_weights(twin)}
    by_peft = {id(parameter): name for name, parameter in trained.items()}
    names = {n: by_peft[id(p)] for n, p in twin.named_parameters() if id(p) in by_peft}
    policy = setup.policy("float32", mode, PlainSteps())
    before = setup.everywhere(policy)
    for split, rows in (("lone", setup.rows[:1]), ("one", setup.rows), ("several", setup.rows)):
        for name, parameter in trained.items():
            parameter.data.copy_(before[name])
        value, gradient = reference(twin, rows, setup.loss)
        stats = policy.update(setup.batch(rows, split), setup.objective)
        after = setup.everywhere(policy)
        update = {name: before[name].double() - after[name].double() for name in before}
        before = after
        expected = {names[name]: tensor for name, tensor in gradient.items()}
        assert relative_error(update, expected) < 1e-5
        assert stats["train/loss"] == pytest.approx(value, rel=1e-4)


@kept
@on_ranks
def test_only_what_is_trained_is_optimized_saved_and_loaded(setup, dtype, mode, saved):
    setup = adapted(setup, saved)
    first, second = (setup.batch(rows) for rows in setup.batches)
    policy, folder = setup.policy(dtype, mode, setup.adamw()), setup.new_folder()
    base = dict(setup.base(dtype).named_parameters())
    policy.update(first, setup.objective)
    middle = setup.everywhere(policy)
    trained = sum(tensor.numel() for tensor in middle.values())
    assert trained < sum(parameter.numel() for parameter in base.values()) / 2
    shared = 1 if mode.startswith("zero0") else setup.ranks.world
    assert 0 < optimized(policy) <= trained / shared * 1.1 + 64  # ZeRO pads
    policy.save(folder)
    assert stored(folder) <= trained
    policy.update(second, setup.objective)
    end = setup.everywhere(policy)
    other = setup.policy(dtype, mode, setup.adamw(), seed=1)
    assert not all_same(setup.everywhere(other), middle)
    other.load(folder)
    assert all_same(setup.everywhere(other), middle)
    other.update(second, setup.objective)
    assert all_same(setup.everywhere(other), end)
    for name, tensor in other.weights().items():  # empty on all ranks but the first
        if "layernorm" in name or name.endswith("embed_tokens.weight"):
            assert torch.equal(tensor, base[name])


def optimized(policy):
    """Return the number of elements for which Adam on this rank keeps a mean gradient."""
    optimizer = policy.engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return sum(state["exp_avg"].numel() for state in states)


def stored(folder):
    """Return the number of elements of weights in the first model file of a checkpoint."""
    (path, *_) = sorted((folder / "deepspeed").glob("*model_states.pt"))
    state = torch.load(path, weights_only=False)
    frozen = state.get("frozen_param_fragments") or {}
    return sum(tensor.numel() for tensor in (*state["module"].values(), *frozen.values()))


@kept
@on_ranks
def test_both_exports_have_the_logprobs_of_the_policy(setup, dtype, mode, saved):
    setup = adapted(setup, saved)
    policy, folder, source = (
        setup.policy(dtype, mode, setup.adamw()),
        setup.new_folder(),
        setup.sources[dtype],
    )
    policy.update(setup.batch(setup.rows), setup.objective)
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
    files, alone = ({p.name for p in (folder / name).iterdir()} for name in ("hf", "alone"))
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not {"config.json", "model.safetensors"} & files
    # Without its base, which exists nowhere else, an adapter would be lost.
    assert {"config.json", "model.safetensors"} <= alone
    assert "adapter_config.json" not in alone


@torch.no_grad()
def gap(model, token_ids, own):
    tokens = torch.tensor(token_ids).long()
    logprobs = torch.log_softmax(model.eval()(tokens).logits[:, :-1].float(), -1)
    plain = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((plain - own[:, 1:]).abs().max())


@kept
@on_ranks
def test_dropout_is_in_the_update_and_not_in_logprobs(setup, dtype, mode, saved):
    batch = setup.batch(setup.rows)
    token_ids = batch.micro_batches[0].token_ids
    policy, plain = (
        adapted(setup, saved, dropout).policy(dtype, mode, PlainSteps()) for dropout in (0.5, 0.0)
    )
    assert torch.equal(policy.logprobs(token_ids), policy.logprobs(token_ids))
    felt, expected = (p.update(batch, setup.objective)["train/loss"] for p in (policy, plain))
    assert felt != expected


@kept
@on_ranks
def test_with_its_adapter_off_a_trained_policy_is_the_model_it_began_as(setup, dtype, mode, saved):
    """So the base is the reference of a divergence, without a second copy."""
    policy = adapted(setup, saved).policy(dtype, mode, setup.adamw())
    policy.update(setup.batch(setup.rows), setup.objective)
    batch = Batch.of(setup.batch(setup.rows).micro_batches[0], setup.ranks.device, 0)
    off, on = policy.base_scores(batch).logprobs, policy.score(batch)
    base = setup.policy(dtype, mode, PlainSteps()).score(batch)
    assert torch.equal(off, base)
    assert (off - on).abs().max() > 0.01
