"""References that run on the trainer's ranks.

initial    the policy at the start of the run: with adapter=lora the base model, else a copy.
           If `refresh_every` > 0, the copy moves towards the policy every `refresh_every` steps.
model      another model with the same tokenizer, for example a teacher
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from msgspec import Meta
from safetensors.torch import load_file, save_file

from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.learner.logprobs import Logprobs, PolicyModule, Rows
from rl.learner.policy import Policy
from rl.learner.reference.protocol import Reference, ReferenceSetting
from rl.model.loading import load_model
from rl.model.pretrained import local_folder
from rl.model.shared_prefixes import share_prefixes, shares_prefixes
from rl.runtime.folder import naming_damage

_FILE = "reference.safetensors"


@dataclass(frozen=True, kw_only=True)
class InitialPolicy:
    """The policy's first weights as the reference (conf/reference/initial.yaml)."""

    is_policy: ClassVar[bool] = True  # the reference is an earlier state of the policy

    refresh_every: NonNegativeInt
    refresh_mix: Annotated[float, Meta(gt=0, le=1)]
    top_k: PositiveInt
    sees_hint: bool

    def start(self, setting: ReferenceSetting) -> Reference:
        top_k = setting.num_candidates(self.top_k)
        if setting.policy.has_adapter:
            return _BaseModel(setting.policy, top_k)
        model = load_model(setting.model, setting.dtype, setting.seed)
        return _ReferenceCopy(model, setting, top_k, self.refresh_every, self.refresh_mix)


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A frozen reference from a local folder or the hub (conf/reference/model.yaml)."""

    same_tokens: ClassVar[bool] = True  # makes the supervisor require the policy's tokenizer

    path: str
    revision: str | None
    dtype: Literal["bfloat16", "float32"]
    top_k: PositiveInt
    sees_hint: bool

    def start(self, setting: ReferenceSetting) -> Reference:
        folder = local_folder(self.path, self.revision, "reference")
        model = load_model(folder, getattr(torch, self.dtype), setting.seed)
        return _ReferenceCopy(model, setting, setting.num_candidates(self.top_k))


class _BaseModel(Reference):
    def __init__(self, policy: Policy, top_k: int) -> None:
        self._policy, self._top_k = policy, top_k

    def score(self, batches: Sequence[Rows]) -> list[Logprobs]:
        return [self._policy.base_scores(rows, self._top_k) for rows in batches]


class _ReferenceCopy(Reference):
    """A reference model on each rank. If `every` > 0, `after_step` moves it towards the policy."""

    def __init__(
        self, model: Any, setting: ReferenceSetting, top_k: int, every: int = 0, mix: float = 1.0
    ) -> None:
        device = setting.policy.ranks.device
        if setting.share_prefixes:
            share_prefixes(model)
        self.shares_prefixes = shares_prefixes(model)
        module = PolicyModule(model, chunk=setting.logprob_chunk, head_dtype=setting.head_dtype)
        self._module = module.to(device).eval()
        self._module.requires_grad_(False)
        self._setting, self._top_k = setting, top_k
        self._every, self._mix = every, mix
        self._parameters = dict(self._module.model.named_parameters())
        is_average = every > 0 and mix < 1  # in float32, because bfloat16 loses small changes
        self._average = {n: p.float() for n, p in self._parameters.items()} if is_average else {}

    @torch.no_grad()
    def score(self, batches: Sequence[Rows]) -> list[Logprobs]:
        top_k = (self._top_k, self._setting.policy.vocabulary) if self._top_k else None
        shared = self._setting.temperature
        temperatures = (shared if r.temperatures is None else r.temperatures for r in batches)
        outputs = (
            self._module(rows.token_ids, rows.mask, temperature, top_k=top_k, kept=rows.kept)
            for rows, temperature in zip(batches, temperatures, strict=True)
        )
        return [Logprobs(logprobs, *likeliest) for logprobs, _, *likeliest in outputs]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self._every or step % self._every:
            return
        new = self._setting.policy.weights()  # all weights on rank 0, {} on other ranks
        for name, parameter in self._parameters.items():
            moved = new[name].to(parameter) if new else torch.empty_like(parameter)
            dist.broadcast(moved, 0)
            if self._average:
                moved = self._average[name].lerp_(moved.float(), self._mix)
            parameter.copy_(moved)

    def save(self, folder: Path) -> None:
        if self._every and self._setting.policy.ranks.first:
            state = self._average or self._parameters
            save_file({n: tensor.contiguous().cpu() for n, tensor in state.items()}, folder / _FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not self._every:
            return
        with naming_damage(folder / _FILE) as path:
            state = load_file(path)
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
            if self._average:
                self._average[name].copy_(state[name])
