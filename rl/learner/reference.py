"""The policy that divergence is measured from, or the teacher: frozen, and loaded only if needed.

    initial    the policy as the run starts; with an adapter the base with the adapter off, else a
               copy, which `refresh_every` may move after the policy
    model      another model with the same tokenizer: a teacher
    endpoint   the same behind another vLLM server, asked for the logprobs of given tokens

B: rows, T: padded length, N: completion tokens of a micro-batch.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
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

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Log probability [N] of each one's completion tokens, at the sampler's temperature."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is worth knowing of the last call."""
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
    head_dtype: torch.dtype | None = None


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

    def metrics(self) -> dict[str, float]:
        """Nothing to know."""
        return {}

    def after_step(self, step: int) -> None:
        """Nothing happens."""

    def save(self, folder: Path) -> None:
        """Nothing to keep."""

    def load(self, folder: Path) -> None:
        """Nothing was kept."""


class _AdapterOff(Unchanging):
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self._policy.score(batch, adapter=False) for batch in batches]


class _Copy(Unchanging):
    """A model on every rank; one that follows the policy keeps its moving average in float32.

    In bfloat16 most of a small step would round to nothing: with a mix of 0.01 it hardly moved.
    """

    def __init__(self, model: Any, setting: ReferenceSetting, every: int, mix: float) -> None:
        device = setting.policy.ranks.device
        module = PolicyModule(model, chunk=setting.logprob_chunk, head_dtype=setting.head_dtype)
        self._module = module.to(device).eval()
        self._module.requires_grad_(False)
        self._setting, self._every, self._mix = setting, every, mix
        self._parameters = dict(self._module.model.named_parameters())
        averages = every > 0 and mix < 1
        self._average = {n: p.float() for n, p in self._parameters.items()} if averages else {}

    @torch.no_grad()
    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        temperature = self._setting.temperature
        return [self._module(b.token_ids, b.mask, temperature)[0] for b in batches]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self._every or step % self._every:
            return
        # Gathered on rank 0 and sent to all: each rank scores with a copy of its own.
        new = self._setting.policy.weights()
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
        state = load_file(folder / _FILE)
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
            if self._average:
                self._average[name].copy_(state[name])


def _require_same_tokens(teacher: Path, student: Path) -> None:
    """A teacher scores the policy's own token ids: they must mean the same to it."""
    teacher_tokenizer, student_tokenizer = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for folder in (teacher, student)
    )
    for key in ("model", "added_tokens"):
        if teacher_tokenizer.get(key) != student_tokenizer.get(key):
            raise RunFailed(
                f"reference.path={teacher} has another tokenizer than the policy, so it cannot "
                "score its tokens: choose a teacher of the same family, or use its text instead "
                "(loss=sft sampler=transcripts)"
            )


_AT_ONCE = 32  # requests in flight
_PASSING = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """conf/reference/endpoint.yaml: another vLLM, asked for the logprobs of given tokens.

    Attributes:
        url: of its OpenAI-compatible API, with /v1.
        model: the name it serves the teacher under.
        timeout: seconds for one row.
        max_retries: further attempts at a row that got no answer, or one that blames the server.

    """

    only_temperature_1: ClassVar[bool] = True

    url: str
    model: str
    timeout: float
    max_retries: int

    def start(self, setting: ReferenceSetting) -> Reference:
        """Connect at the first batch."""
        assert setting.temperature == 1, "refused by rl/config/algorithm_rules.py"
        return _Remote(self)


class _Remote(Unchanging):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._where = endpoint, f"reference.url={endpoint.url}"
        self._url = f"{endpoint.url.rstrip('/')}/completions"
        self._http = httpx.Client(timeout=endpoint.timeout)
        self._retries: list[str] = []  # what went wrong, of the last call; appending is atomic

    def metrics(self) -> dict[str, float]:
        return {"train/reference_retries": float(len(self._retries))}

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Ask for the rows of all micro-batches together: the server waits for none of ours."""
        self._retries = []
        # Up to the last token that counts: padding and a trailing reply are not worth scoring.
        masks = [batch.mask.cpu() for batch in batches]
        texts = [
            ids[: int(row.nonzero().max()) + 1].tolist() if row.any() else []
            for batch, mask in zip(batches, masks, strict=True)
            for ids, row in zip(batch.token_ids.cpu(), mask, strict=True)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            scores = pool.map(self._score, texts)
            logprobs = []
            for batch, mask in zip(batches, masks, strict=True):
                whole = torch.zeros(mask.shape)
                for row, score in zip(whole, islice(scores, len(whole)), strict=True):
                    row[: len(score)] = torch.tensor(score)
                logprobs.append(whole[mask].to(batch.rollout_logprobs))
        return logprobs

    def _score(self, token_ids: list[int]) -> list[float]:
        """Logprob of each token; 0 for the first."""
        if not token_ids:
            return []
        body = {"model": self._endpoint.model, "prompt": token_ids, "max_tokens": 1}
        answer = self._answer({**body, "prompt_logprobs": 0})
        entries = answer["choices"][0].get("prompt_logprobs")
        if not entries:
            raise RunFailed(f"{self._where} returns no prompt_logprobs: it must be a vLLM server")
        pairs = zip(entries[1:], token_ids[1:], strict=True)
        return [0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)]

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask until there is an answer, at most `max_retries` times more than once."""
        problem = ""
        for attempt in range(self._endpoint.max_retries + 1):
            if attempt:
                self._retries.append(problem)
                time.sleep(min(0.25 * 2**attempt, 8.0))
            try:
                answer = self._http.post(self._url, json=body)
                if answer.status_code == httpx.codes.OK:
                    return answer.json()
                problem = f"answered {answer.status_code}: {answer.text[:300]}"
                if answer.status_code < 500 and answer.status_code not in _PASSING:
                    break  # it is the question, and would be the same one again
            except (httpx.HTTPError, ValueError) as error:  # ValueError: a body cut short
                problem = f"did not answer ({type(error).__name__}: {error})"
        raise RunFailed(f"{self._where} {problem}")
