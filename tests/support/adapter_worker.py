"""One rank of the LoRA tests under DeepSpeed, in the manner of policy_worker.py.

python -m tests.support.adapter_worker <folder>    RANK, LOCAL_RANK, WORLD_SIZE are set
"""

import gc
import json
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.policy_setup import PlainSteps, all_same
from tests.support.policy_worker import Cases

GRADIENTS = {  # the shipped ZeRO stages, and how
    1: ("zero0", "zero0 checkpointing compiled"),
    2: ("zero0", "zero1", "zero2", "zero3", "zero3 scattered checkpointing"),
}
SPLITS = ("one", "several")
KEPT = {  # dtype, how, modules_to_save
    1: (
        ("float32", "zero0", ()),
        ("bfloat16", "zero0", ("model.norm",)),
    ),
    2: (
        ("float32", "zero1", ("model.norm",)),
        ("bfloat16", "zero2", ()),
        ("bfloat16", "zero3", ("model.norm",)),
        ("float32", "zero3 scattered", ()),
    ),
}


def main(folder: Path) -> None:
    from rl.learner.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks.join(folder / "rendezvous", 60.0)
    cases = AdapterCases(folder, ranks)
    gc.freeze()
    measured = {
        **{f"gradient {mode}": cases.gradients(mode) for mode in GRADIENTS[ranks.world]},
        **{f"{dtype} {mode}": cases.kept(dtype, mode, s) for dtype, mode, s in KEPT[ranks.world]},
    }
    if ranks.first:
        (folder / "measured.json").write_text(json.dumps(measured))


class AdapterCases(Cases):
    """Policies with an adapter that is no longer zero."""

    saved: tuple[str, ...] = ()
    dropout = 0.0
    plain = False  # without an adapter, just now

    def __init__(self, folder: Path, ranks: Any) -> None:
        super().__init__(folder, ranks)
        self.whole = {}  # the sources, their weights beside the config
        for dtype, source in self.sources.items():
            weights = dict(super().model(dtype, 0).named_parameters())
            self.whole[dtype] = Path(copytree(source, source.with_name(f"{dtype}-whole")))
            # By hand: save_pretrained writes on the first rank alone.
            save_file(weights, self.whole[dtype] / "model.safetensors", metadata={"format": "pt"})

    def adapted(self, model: Any, seed: int) -> Any:
        from rl.model.lora import LoRA

        knobs = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "rslora": False}
        saved = list(self.saved)
        adapter = LoRA(**knobs, dropout=self.dropout, modules_to_save=saved)
        model = adapter.attach(model, seed, str(self.sources["float32"]))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += 0.1 * noise.to(parameter.dtype)
        return model

    def model(self, dtype: str, seed: int) -> Any:
        model = super().model(dtype, 0)
        return model if self.plain else self.adapted(model, seed)

    def everywhere(self, policy: Any) -> dict[str, torch.Tensor]:
        """A copy of what is trained, on every rank."""
        found = [{name: tensor.clone() for name, tensor in policy.adapter_weights().items()}]
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def gradients(self, mode: str) -> dict[str, Any]:
        from rl.model.lora import adapter_weights
        from tests.support.tiny_policy import exact_model, reference, relative_error

        twin = self.adapted(exact_model(self.sources["float32"]), 0)
        trained = {recipe.name: recipe.parts[0] for recipe in adapter_weights(twin)}
        by_peft = {id(parameter): name for name, parameter in trained.items()}
        ours = {n: by_peft[id(p)] for n, p in twin.named_parameters() if id(p) in by_peft}
        policy = self.policy("float32", mode, PlainSteps())
        before = self.everywhere(policy)
        result: dict[str, Any] = {}
        for split, rows in [("lone", self.rows[:1]), *((split, self.rows) for split in SPLITS)]:
            for name, parameter in trained.items():
                parameter.data.copy_(before[name])
            value, gradient = reference(twin, rows, self.loss)
            stats = policy.update(self.batch(rows, split), self.objective)
            after = self.everywhere(policy)
            update = {name: before[name].double() - after[name].double() for name in before}
            expected = {ours[name]: tensor for name, tensor in gradient.items()}
            before = after
            result[split] = {
                "error": relative_error(update, expected),
                "value": value,
                "loss": stats["train/loss"],
            }
        return result

    def kept(self, dtype: str, mode: str, saved: tuple[str, ...]) -> dict[str, Any]:
        """An update, a checkpoint, another update; then the same from the checkpoint."""
        self.saved = saved
        first, second = (self.batch(rows) for rows in self.batches)
        policy = self.policy(dtype, mode, self.adamw())
        base = dict(super().model(dtype, 0).named_parameters())
        policy.update(first, self.objective)
        middle = self.everywhere(policy)
        result: dict[str, Any] = {"optimized": optimized(policy)}
        result["trained"] = sum(tensor.numel() for tensor in middle.values())
        folder = self.folder / f"{dtype} {mode}"
        policy.save(folder)
        result["stored"] = self.stored(folder)
        result["full"] = sum(parameter.numel() for parameter in base.values())
        result |= self.exported(policy, dtype, folder)
        policy.update(second, self.objective)
        end = self.everywhere(policy)
        other = self.policy(dtype, mode, self.adamw(), seed=1)
        differs = not all_same(self.everywhere(other), middle)
        other.load(folder)
        result["loaded"] = differs and all_same(self.everywhere(other), middle)
        other.update(second, self.objective)
        result["next"] = all_same(self.everywhere(other), end)
        full = other.weights()
        norms = [n for n in full if "layernorm" in n or n.endswith("embed_tokens.weight")]
        result["frozen"] = all(torch.equal(full[name], base[name]) for name in norms)
        result["quiet"] = self.quiet(dtype, mode)
        result["reference"] = self.base_as_reference(policy, dtype, mode)
        self.saved = ()
        return result

    def base_as_reference(self, policy: Any, dtype: str, mode: str) -> dict[str, float]:
        """Logprobs of a trained policy with its adapter off, against the model it began as."""
        from rl.learner.objective import Batch

        micro = self.batch(self.rows).micro_batches[0]
        batch = Batch.of(micro, self.ranks.device, 0)
        off, on = policy.base_scores(batch).logprobs, policy.score(batch)
        self.plain = True
        base = self.policy(dtype, mode, PlainSteps()).score(batch)
        self.plain = False
        return {"base": float((off - base).abs().max()), "policy": float((off - on).abs().max())}

    def stored(self, folder: Path) -> int:
        """Elements of model weights in the checkpoint's model file of this rank or rank 0."""
        (path, *_) = sorted((folder / "deepspeed").glob("*model_states.pt"))
        state = torch.load(path, weights_only=False)
        frozen = state.get("frozen_param_fragments") or {}
        found = [*state["module"].values(), *frozen.values()]
        return sum(tensor.numel() for tensor in found)

    def exported(self, policy: Any, dtype: str, folder: Path) -> dict[str, Any]:
        """Logprobs of the policy against those of both exports, as others load them."""
        policy.export(folder / "hf", self.whole[dtype])
        policy.export(folder / "merged", self.whole[dtype], merged=True)
        policy.export(folder / "alone", self.sources[dtype])  # a config without weights
        token_ids = self.batch(self.rows).micro_batches[0].token_ids
        ours = policy.logprobs(token_ids)
        if not self.ranks.first:
            return {}
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base = super().model(dtype, 0)
        loaded = PeftModel.from_pretrained(base, folder / "hf", autocast_adapter_dtype=False)
        merged: Any = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="auto")
        return {
            "peft": gap(loaded, token_ids, ours),
            "merged": gap(merged, token_ids, ours),
            "merged dtype": str(merged.dtype),
            "text": AutoTokenizer.from_pretrained(folder / "hf").decode([104, 105]),
            "files": sorted(path.name for path in (folder / "hf").iterdir()),
            "alone": sorted(path.name for path in (folder / "alone").iterdir()),
        }

    def quiet(self, dtype: str, mode: str) -> list[bool]:
        """Whether logprobs are free of dropout, and whether updates are not."""
        self.dropout = 0.5
        policy = self.policy(dtype, mode, PlainSteps())
        self.dropout = 0.0
        batch = self.batch(self.rows)
        token_ids = batch.micro_batches[0].token_ids
        same = torch.equal(policy.logprobs(token_ids), policy.logprobs(token_ids))
        plain = self.policy(dtype, mode, PlainSteps())
        felt = policy.update(batch, self.objective)["train/loss"]
        return [same, felt != plain.update(batch, self.objective)["train/loss"]]


def optimized(policy: Any) -> int:
    """Elements that Adam on this rank keeps a mean gradient for."""
    optimizer = policy.engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return sum(state["exp_avg"].numel() for state in states)


@torch.no_grad()
def gap(model: Any, token_ids: Any, ours: torch.Tensor) -> float:
    tokens = torch.tensor(token_ids).long()
    logprobs = torch.log_softmax(model.eval()(tokens).logits[:, :-1].float(), -1)
    plain = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((plain - ours[:, 1:]).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
