"""The policy in training: a Hugging Face model in a DeepSpeed engine, which only we know."""

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl.logprobs import PolicyModule
from rl.objective import Batch, Objective
from rl.optim import AdamW
from rl.records import Ints, RankBatch


@dataclass(frozen=True)
class Ranks:
    """This process among those that train."""

    rank: int
    world: int
    device: torch.device

    @staticmethod
    def join(rendezvous: Path, timeout: float) -> "Ranks":
        """Meet the other ranks through a file; RANK and WORLD_SIZE come from the environment."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            auto_mpi_discovery=False,
            verbose=False,
        )
        return Ranks(rank, world, torch.device("cuda" if cuda else "cpu"))

    @property
    def first(self) -> bool:
        """True on the rank that talks to the outside."""
        return self.rank == 0


def load_model(folder: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a local model folder; one without weights is initialised from its config and `seed`."""
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return model


class Policy:
    """Weights, optimizer and the two things done with them: update and logprobs."""

    def __init__(
        self,
        model: PreTrainedModel,
        optim: AdamW,
        ranks: Ranks,
        *,
        deepspeed_config: dict[str, Any],
        max_steps: int,
        max_grad_norm: float,
        logprob_chunk: int,
        temperature: float,
    ) -> None:
        self.ranks, self._optim, self._max_steps = ranks, optim, max_steps
        self._temperature = temperature
        self._max_grad_norm = max_grad_norm
        module = PolicyModule(model, chunk=logprob_chunk)
        half = model.dtype == torch.bfloat16
        config = {
            **deepspeed_config,
            "train_micro_batch_size_per_gpu": 1,  # required, unused: the plan decides
            "gradient_accumulation_steps": 1,
            # Gradients add up over any number of backward passes until we call step().
            "managed_gradient_accumulation": False,
            "gradient_clipping": max_grad_norm,
            "bf16": {"enabled": half},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = optim.optimizer(module.parameters())
        _set_rate(optimizer, 0.0)  # DeepSpeed may take a step of its own on the way
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.engine: Any = engine  # DeepSpeed's own annotations are of little use
        self.zero_stage: int = self.engine.zero_optimization_stage()
        if self.zero_stage == 3:
            # Used outside of the head's own forward (rl/logprobs.py): gathered once for a pass.
            for parameter in module.head.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        if self.zero_stage == 0 and half:
            # DeepSpeed has taken a step without gradients, which would make Adam's first too short.
            self.engine.optimizer.state.clear()
        elif self.zero_stage == 0:
            # Here DeepSpeed keeps the norm to itself, and steps on gradients that are not finite.
            self.engine.clip_fp32_gradients = self._clip

    def update(self, batch: RankBatch, objective: Objective) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a batch.

        Returns metrics of the global batch, the same on every rank. A step whose gradient is not
        finite is skipped: the weights stay as they were and `train/skipped` is 1.
        """
        sums: dict[str, Tensor] = {}
        for micro in batch.micro_batches:
            on_device = Batch.of(micro, self.ranks.device)
            logprobs, entropies = self.engine(
                on_device.token_ids, on_device.mask, self._temperature
            )
            value, metrics = objective(on_device, logprobs)
            # DeepSpeed averages gradients over ranks; the objective is a sum over them.
            self.engine.backward(_minimised(value, logprobs) * self.ranks.world)
            fresh = on_device.token_versions == batch.step  # sampled by the very same weights
            gap = (logprobs.detach() - on_device.rollout_logprobs).abs()
            _add(sums, "loss", value.detach())
            _add(sums, "tokens", torch.tensor(float(len(logprobs))))
            _add(sums, "fresh_tokens", fresh.sum())
            _add(sums, "fresh_gap", gap[fresh].sum())
            for name, values in {**metrics, "entropy": entropies}.items():
                _add(sums, f"mean/{name}", values.sum())
        totals = self._sum_over_ranks(sums)
        rate = self._optim.rate(batch.step, self._max_steps)
        return {**_means(totals), **self._step(rate)}

    def _step(self, rate: float) -> dict[str, float]:
        _set_rate(self.engine.optimizer, rate)
        self.engine.step()  # skips, and forgets the gradient, if its norm is not finite
        norm = float(self.engine.get_global_grad_norm())
        return {
            "train/learning_rate": rate,
            "train/grad_norm": norm if _finite(norm) else float("nan"),
            "train/skipped": float(not _finite(norm)),
        }

    def _clip(self) -> None:
        """Clip as every other stage does; without gradients the optimizer steps nowhere."""
        norm = clip_grad_norm_(self.engine.module.parameters(), self._max_grad_norm)
        self.engine._global_grad_norm = norm  # what get_global_grad_norm returns
        if not norm.isfinite():
            self.engine.zero_grad()

    def _sum_over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        names = sorted(sums)
        values = torch.stack([sums[name].double().cpu() for name in names]).to(self.ranks.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    @torch.no_grad()
    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Tensor:
        """Return logprobs [B, T] of all `token_ids` [B, T] given those before (0 at position 0).

        All ranks must call it together.
        """
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.ranks.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        flat, _ = self.engine(tokens, mask, temperature)
        result = flat.new_zeros(tokens.shape)
        result[mask] = flat
        return result.cpu()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights under Hugging Face names, tied ones once; on rank 0, else empty.

        All ranks must call it together: under ZeRO-3 each holds a part.
        """
        collected: dict[str, Tensor] = {}
        for name, parameter in self.engine.module.model.named_parameters():
            whole = (
                deepspeed.zero.GatheredParameters([parameter])
                if self.zero_stage == 3
                else nullcontext()
            )
            with whole:
                if self.ranks.first:
                    tensor = parameter.detach().cpu()
                    collected[name] = tensor.clone() if self.zero_stage == 3 else tensor
        return collected

    def export(self, folder: Path, source: Path) -> None:
        """Write the model in Hugging Face form with the tokenizer of `source`. Collective."""
        weights = self.weights()
        if not self.ranks.first:
            return
        model: PreTrainedModel = self.engine.module.model
        model.save_pretrained(folder, state_dict=weights)
        for path in source.iterdir():
            if (
                path.suffix in (".json", ".jinja", ".txt", ".model")
                and not (folder / path.name).exists()
            ):
                shutil.copy2(path, folder)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule state for `load`. Collective."""
        self.engine.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote. Collective."""
        found, _ = self.engine.load_checkpoint(str(folder), tag="deepspeed")
        if found is None:
            raise ValueError(f"{folder} holds no DeepSpeed state that can be loaded")


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def _minimised(value: Tensor, logprobs: Tensor) -> Tensor:
    """`value`, or something with a gradient of NaN if it is not finite.

    DeepSpeed looks at gradients only. A NaN in one of them reaches every rank, and each ZeRO
    stage then skips the step and empties its own buffers, which `zero_grad` does not do under all
    of them.
    """
    return value if value.isfinite() else logprobs.sum() * float("nan")


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _means(totals: dict[str, float]) -> dict[str, float]:
    tokens = max(totals["tokens"], 1.0)
    metrics = {
        f"train/{name.removeprefix('mean/')}": total / tokens
        for name, total in totals.items()
        if name.startswith("mean/")
    }
    metrics["train/loss"] = totals["loss"]
    if totals["fresh_tokens"]:
        metrics["mismatch/sampled_mean_abs"] = totals["fresh_gap"] / totals["fresh_tokens"]
    return metrics
