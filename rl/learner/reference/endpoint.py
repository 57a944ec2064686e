"""A teacher on another vLLM server, which computes logprobs of the policy's tokens.

Each request contains one row as its prompt. The response contains the logprob of each token of the
prompt (`prompt_logprobs`), and the top_k most likely tokens if the loss compares distributions.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from envs.http_client import HttpClient, HttpError
from rl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from rl.learner.logprobs import Logprobs, Rows
from rl.learner.policy import Policy
from rl.learner.reference.protocol import Reference, ReferenceSetting, join_scores
from rl.model.folder import OTHER_TOKENIZER
from rl.model.tokenizer import Tokenizer
from rl.runtime.failure import RunFailed

_MAX_REQUESTS = 32  # maximum number of concurrent requests of a rank
_MAX_RESPONSE_MIB = 1024  # large, because a response has top_k candidates for each token
_TEST_TEXT = "Tokenizers differ: 3.14159 naïve ideas, 東京 + café; def f(x):\n\treturn x**2  # 100%"
_TOP_K_LIMIT = re.compile(r"prompt logprobs of \d+, which is greater than max allowed: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The options of conf/reference/endpoint.yaml: a teacher on another vLLM server."""

    only_temperature_1: ClassVar[bool] = True
    over_http: ClassVar[bool] = True  # makes the supervisor test the connection to `url`

    url: str
    model: str
    api_key_variable: str | None
    timeout: PositiveFloat
    max_retries: NonNegativeInt
    top_k: PositiveInt
    sees_hint: bool

    def start(self, setting: ReferenceSetting) -> Reference:
        assert setting.temperature == 1, "rl/config/reference_rules.py refuses other temperatures"
        top_k = setting.num_candidates(self.top_k)
        remote = _RemoteTeacher(self, top_k, setting.policy)
        remote.require_fit(setting.model, setting.max_seq_len)
        return remote


class _RemoteTeacher(Reference):
    def __init__(self, endpoint: Endpoint, top_k: int, policy: Policy) -> None:
        self._endpoint, self._top_k, self._policy = endpoint, top_k, policy
        self._where = f"reference.url={endpoint.url}"
        self._url = f"{endpoint.url.rstrip('/')}/completions"
        self._retries = 0  # retries during the last call of `score`

    def _client(self, max_retries: int) -> HttpClient:
        return HttpClient(
            timeout=self._endpoint.timeout,
            max_retries=max_retries,
            max_concurrent=_MAX_REQUESTS,
            max_mib=_MAX_RESPONSE_MIB,
            api_key_variable=self._endpoint.api_key_variable,
        )

    def require_fit(self, policy_folder: Path, max_seq_len: int) -> None:
        """Raise RunFailed if the server reports an unsuitable tokenizer or maximum length."""
        root = self._endpoint.url.rstrip("/").removesuffix("/v1")
        body = {"model": self._endpoint.model, "prompt": _TEST_TEXT, "add_special_tokens": False}
        try:
            asked = self._client(max_retries=0).send_once("POST", f"{root}/tokenize", body)
            answer = json.loads(asyncio.run(asked))
            tokens, longest = answer.get("tokens"), answer.get("max_model_len")
        except (HttpError, ValueError, AttributeError):
            return  # the server has no usable route /tokenize, so skip the check
        if tokens is not None and tokens != Tokenizer(policy_folder).encode(_TEST_TEXT):
            raise RunFailed(f"{self._where} {OTHER_TOKENIZER}")
        if isinstance(longest, int) and longest <= max_seq_len:
            raise RunFailed(
                f"{self._where} accepts {longest} tokens, but a request may contain max_seq_len="
                f"{max_seq_len} tokens, and the server must generate one more: start the server "
                f"with --max-model-len {max_seq_len + 1}, or lower max_seq_len"
            )

    def metrics(self) -> dict[str, float]:
        # Sum over the ranks, because each rank sends its own requests and only rank 0 logs.
        return {"train/reference_retries": self._policy.ranks.sum(float(self._retries))}

    def score(self, batches: Sequence[Rows]) -> list[Logprobs]:
        requests = [
            (ids.tolist(), row.nonzero()[:, 0].tolist())
            for rows in batches
            for ids, row in zip(rows.token_ids.cpu(), rows.mask.cpu(), strict=True)
        ]
        answers = iter(asyncio.run(self._request_all(requests)))
        return [
            join_scores(
                list(islice(answers, len(rows.mask))),
                lambda scores, device=rows.mask.device: scores.to(device),
            )
            for rows in batches
        ]

    async def _request_all(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[Logprobs]:
        client = self._client(self._endpoint.max_retries)
        tasks = [asyncio.create_task(self._request(client, *row)) for row in rows]
        async with client:
            try:
                return await asyncio.gather(*tasks)
            finally:
                self._retries = client.num_retries
                for task in tasks:  # if one task failed, cancel all other tasks
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(
        self, client: HttpClient, token_ids: list[int], to_score: list[int]
    ) -> Logprobs:
        if not to_score:
            return self._read([], [])
        # Cut the row after its last completion token, because later tokens need no score.
        prompt = token_ids[: to_score[-1] + 1]
        body = {"model": self._endpoint.model, "prompt": prompt, "max_tokens": 1}
        try:
            text = await client.post(self._url, {**body, "prompt_logprobs": self._top_k})
        except HttpError as error:
            problem = str(error)
            if allowed := _TOP_K_LIMIT.search(error.text):
                problem = (
                    f"returns at most {allowed[1]} likely tokens, fewer than reference.top_k="
                    f"{self._top_k}: lower top_k, or start the server with --max-logprobs "
                    f"{self._top_k}"
                )
            raise RunFailed(f"{self._where} {problem}") from error
        try:
            entries = json.loads(text)["choices"][0].get("prompt_logprobs")
            if entries:
                return self._read([entries[i] for i in to_score], [token_ids[i] for i in to_score])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RunFailed(
                f"{self._where} did not send the prompt_logprobs of each token, but {text[:200]!r} "
                f"({type(error).__name__}: {error}): use the URL of a vLLM server"
            ) from error
        raise RunFailed(f"{self._where} returns no prompt_logprobs: use a vLLM server")

    def _read(self, entries: list[dict[str, Any]], tokens: list[int]) -> Logprobs:
        """Convert entries {token id: {"logprob": number}}, one per scored token, to tensors."""
        pairs = zip(entries, tokens, strict=True)
        logprobs = torch.tensor([float(entry[str(t)]["logprob"]) for entry, t in pairs])
        if not self._top_k:
            return Logprobs(logprobs)
        # vLLM returns the row's own token in addition to the most likely ones, so keep only top_k.
        best = [
            sorted(((float(e["logprob"]), int(t)) for t, e in entry.items()), reverse=True)
            for entry in entries
        ]
        best = [row[: self._top_k] for row in best]
        shape = (len(best), self._top_k)
        ids = torch.tensor([[t for _, t in row] for row in best], dtype=torch.int64).reshape(shape)
        if (ids >= self._policy.vocabulary).any():  # the teacher has a larger vocabulary
            raise RunFailed(
                f"{self._where} returns the token id {int(ids.max())}, but the policy has only "
                f"{self._policy.vocabulary} tokens: lower reference.top_k, or use another teacher"
            )
        values = torch.tensor([[value for value, _ in row] for row in best])
        return Logprobs(logprobs, ids, values.reshape(shape))
