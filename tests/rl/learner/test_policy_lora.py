"""LoRA under every ZeRO stage, compared with plain torch and peft."""

import functools
import re
from pathlib import Path
from shutil import copytree

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.learner.logprobs import Rows
from rl.learner.objective import Batch
from tests.rl.learner.test_updates import initial
from tests.support.policy_setup import ADAPTED, PlainSteps, adapted
from tests.support.ranks import on_ranks, per_world

kept = per_world("dtype, mode, saved", ADAPTED)


@functools.cache
def trained(setup, dtype, mode):
    """Return a policy with an adapter after one step, which several tests read."""
    policy = setup.policy(dtype, mode, setup.adamw())
    policy.update(setup.batch(setup.rows), setup.objective)
    return policy


@per_world("mode", {1: ["zero0", "zero2", "zero3"]})
@on_ranks
def test_a_checkpoint_without_a_trained_weight_is_refused(setup, mode):
    setup = adapted(setup)
    policy, folder = setup.policy("bfloat16", mode, setup.adamw()), setup.new_folder()
    policy.save(folder)
    (path,) = (folder / "deepspeed").glob("*model_states.pt")
    state = torch.load(path, weights_only=False)
    assert all("lora_" in name for name in state["module"])  # nothing that is not trained
    policy.load(folder)
    name = next(iter(state["module"]))
    del state["module"][name]
    torch.save(state, path)
    with pytest.raises(RuntimeError, match=re.escape(name)):
        policy.load(folder)
    with pytest.raises(ValueError, match="lacks DeepSpeed's files: restore them, or delete the"):
        policy.load(setup.new_folder())


@kept
@on_ranks
def test_both_exports_have_the_logprobs_of_the_policy(setup, dtype, mode, saved):
    setup = adapted(setup, saved)
    policy, folder = trained(setup, dtype, mode), setup.new_folder()
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


@kept
@on_ranks
def test_with_its_adapter_off_a_trained_policy_is_the_model_it_began_as(setup, dtype, mode, saved):
    """So the base is the reference of a divergence, without a second copy."""
    policy = trained(adapted(setup, saved), dtype, mode)
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
