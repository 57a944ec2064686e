"""The policy that divergence is measured from, or the teacher: frozen, and loaded only if needed.

    initial    the policy as the run starts; with an adapter the base with the adapter off, else a
               copy, which `refresh_every` may move after the policy
    model      another model with the same tokenizer: a teacher
    endpoint   the same behind another vLLM server (rl/learner/reference.py)

B: rows, T: padded length, N: completion tokens of a micro-batch.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.model.loading import load_model
from rl.model.pretrained import local_folder
from rl.run.failure import RunFailed

_FILE = "reference.safetensors"


class Reference(Protocol):
    """What the trainer asks of a reference. All ranks call every method together."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Log probability [N] of the completion tokens, at the sampler's temperature."""
        ...

    def after_step(self, step: int) -> None:
        """`step` steps are done."""
        ...

    def save(self, folder: Path) -> None:
        """Write what cannot be loaded from elsewhere."""
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote."""
        ...


@dataclass(frozen=True)
class ReferenceSetting:
    """What a reference may be made from."""

    policy: Policy
    model: Path  # folder the policy started from
    dtype: torch.dtype
    temperature: float
    logprob_chunk: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class NoReference:
    """conf/reference/none.yaml."""

    has_logprobs: ClassVar[bool] = False

    def start(self, setting: ReferenceSetting) -> Reference:  # noqa: ARG002 one signature for all
        """Nothing may ask for one."""
        raise AssertionError("rl/config/algorithm_rules.py refuses what needs a reference here")


@dataclass(frozen=True, kw_only=True)
class InitialPolicy:
    """conf/reference/initial.yaml.

    Attributes:
        refresh_every: steps between two refreshes; 0: never.
        refresh_mix: share of the policy in the refreshed reference; 1 replaces it.

    """

    is_policy: ClassVar[bool] = True  # the policy itself, as it was

    refresh_every: int
    refresh_mix: float

    def start(self, setting: ReferenceSetting) -> Reference:
        """Return the base with its adapter off, or a copy of the weights."""
        if setting.policy.has_adapter:
            return _AdapterOff(setting.policy)
        model = load_model(setting.model, setting.dtype, setting.seed)
        return _Copy(model, setting, self.refresh_every, self.refresh_mix)


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """conf/reference/model.yaml: a local folder or a name on the hub, as model.path."""

    path: str
    revision: str | None
    dtype: Literal["bfloat16", "float32"]

    def start(self, setting: ReferenceSetting) -> Reference:
        """Load it on every rank."""
        folder = local_folder(self.path, self.revision, "reference")
        _require_same_tokens(folder, setting.model)
        model = load_model(folder, getattr(torch, self.dtype), setting.seed)
        return _Copy(model, setting, 0, 1.0)


class Unchanging:
    """A reference that never changes and comes from elsewhere."""

    def after_step(self, step: int) -> None:
        """Nothing happens."""

    def save(self, folder: Path) -> None:
        """Nothing to keep."""

    def load(self, folder: Path) -> None:
        """Nothing was kept."""


class _AdapterOff(Unchanging):
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, batch: Batch) -> Tensor:
        return self._policy.score(batch, adapter=False)


class _Copy:
    def __init__(self, model: Any, setting: ReferenceSetting, every: int, mix: float) -> None:
        device = setting.policy.ranks.device
        self._module = PolicyModule(model, chunk=setting.logprob_chunk).to(device).eval()
        self._module.requires_grad_(False)
        self._setting, self._every, self._mix = setting, every, mix

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        return self._module(batch.token_ids, batch.mask, self._setting.temperature)[0]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self._every or step % self._every:
            return
        new = self._setting.policy.weights()  # on rank 0
        for name, parameter in self._module.model.named_parameters():
            moved = new[name].to(parameter) if new else torch.empty_like(parameter)
            dist.broadcast(moved, 0)
            parameter.copy_(parameter.float().lerp(moved.float(), self._mix))

    def save(self, folder: Path) -> None:
        if self._every and self._setting.policy.ranks.first:
            state = {n: p.contiguous().cpu() for n, p in self._module.model.named_parameters()}
            save_file(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        if self._every:
            state = load_file(folder / _FILE)
            for name, parameter in self._module.model.named_parameters():
                parameter.data.copy_(state[name])


def _require_same_tokens(teacher: Path, student: Path) -> None:
    """A teacher scores the policy's own token ids: they must mean the same to it."""
    theirs, ours = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for folder in (teacher, student)
    )
    for key in ("model", "added_tokens"):
        if theirs.get(key) != ours.get(key):
            raise RunFailed(
                f"reference.path={teacher} has another tokenizer than the policy, so it cannot "
                "score its tokens: choose a teacher of the same family, or use its text instead "
                "(loss=sft sampler=transcripts)"
            )


_AT_ONCE = 32  # requests in flight


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """conf/reference/endpoint.yaml: another vLLM, asked for the logprobs of given tokens.

    Attributes:
        url: of its OpenAI-compatible API, with /v1.
        model: the name it serves the teacher under.
        timeout: seconds for one row.

    """

    only_temperature_1: ClassVar[bool] = True

    url: str
    model: str
    timeout: float

    def start(self, setting: ReferenceSetting) -> Reference:
        """Connect at the first batch."""
        assert setting.temperature == 1, "refused by rl/config/algorithm_rules.py"
        return _Remote(self)


class _Remote(Unchanging):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._http = httpx.Client(timeout=endpoint.timeout)

    def logprobs(self, batch: Batch) -> Tensor:
        mask = batch.mask.cpu()
        ends = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]
        rows = [ids[:end].tolist() for ids, end in zip(batch.token_ids.cpu(), ends, strict=True)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            scores = list(pool.map(self._score, rows))
        whole = torch.zeros(mask.shape)
        for row, found in zip(whole, scores, strict=True):
            row[: len(found)] = torch.tensor(found)
        return whole[mask].to(batch.rollout_logprobs)

    def _score(self, token_ids: list[int]) -> list[float]:
        """Logprob of each token; 0 for the first."""
        if not token_ids:
            return []
        where = f"reference.url={self._endpoint.url}"
        body = {"model": self._endpoint.model, "prompt": token_ids, "max_tokens": 1}
        try:
            answer = self._http.post(
                f"{self._endpoint.url.rstrip('/')}/completions", json={**body, "prompt_logprobs": 0}
            )
        except httpx.HTTPError as error:
            raise RunFailed(f"{where} did not answer ({type(error).__name__}: {error})") from error
        if answer.status_code != httpx.codes.OK:
            raise RunFailed(f"{where} answered {answer.status_code}: {answer.text[:300]}")
        entries = answer.json()["choices"][0].get("prompt_logprobs")
        if not entries:
            raise RunFailed(f"{where} returns no prompt_logprobs: it must be a vLLM server")
        pairs = zip(entries[1:], token_ids[1:], strict=True)
        return [0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)]
