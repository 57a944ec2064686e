"""A teacher behind another vLLM server, asked for the logprobs of given tokens.

One request per row. The row is the prompt, and `prompt_logprobs` returns the logprob of each token,
with the top_k most likely tokens if the loss compares distributions.

N: completion tokens of a micro-batch, K: top_k.
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
from rl.learner.logprobs import Rows, Scored
from rl.learner.ranks import Ranks
from rl.learner.reference.protocol import Reference, ReferenceSetting, joined
from rl.model.tokenizer import Tokenizer
from rl.runtime.failure import RunFailed

_AT_ONCE = 32  # requests in flight
_LARGEST_MIB = 1024  # an answer holds top_k candidates for each token of a row
_SAMPLE = "Tokenizers differ: 3.14159 naïve ideas, 東京 + café; def f(x):\n\treturn x**2  # 100%"
_ALLOWED = re.compile(r"prompt logprobs of \d+, which is greater than max allowed: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """conf/reference/endpoint.yaml: another vLLM, asked for the logprobs of given tokens.

    Attributes:
        url: of the server's OpenAI-compatible API, with /v1.
        model: the teacher's name on the server.
        timeout: seconds for one row.
        max_retries: further attempts after no answer, or after an error of the server.
        top_k: candidates at each token, if the loss compares distributions.
        sees_hint: its prompts hold the hints of the examples (rl/sampling/chat.py).

    """

    only_temperature_1: ClassVar[bool] = True

    url: str
    model: str
    timeout: PositiveFloat
    max_retries: NonNegativeInt
    top_k: PositiveInt
    sees_hint: bool

    def start(self, setting: ReferenceSetting) -> Reference:
        """Compare the tokenizers; other faults of the server show at the first batch."""
        assert setting.temperature == 1, "refused by rl/config/algorithm_rules.py"
        top_k = setting.num_candidates(self.top_k)
        remote = _Remote(self, top_k, setting.vocabulary, setting.policy.ranks)
        remote.require_fit(setting.model, setting.max_seq_len)
        return remote


class _Remote(Reference):
    def __init__(self, endpoint: Endpoint, top_k: int, vocabulary: int, ranks: Ranks) -> None:
        self._endpoint, self._top_k, self._vocabulary = endpoint, top_k, vocabulary
        self._ranks = ranks
        self._where = f"reference.url={endpoint.url}"
        self._url = f"{endpoint.url.rstrip('/')}/completions"
        self._retries = 0  # of the last call of `score`

    def _client(self, max_retries: int) -> HttpClient:
        timeout = self._endpoint.timeout
        return HttpClient(
            timeout=timeout, max_retries=max_retries, max_concurrent=_AT_ONCE, max_mib=_LARGEST_MIB
        )

    def require_fit(self, student: Path, max_seq_len: int) -> None:
        """Raise RunFailed if the server has another tokenizer, or takes shorter rows.

        A server that does not answer, or has no such route, is not checked.
        """
        root = self._endpoint.url.rstrip("/").removesuffix("/v1")
        body = {"model": self._endpoint.model, "prompt": _SAMPLE, "add_special_tokens": False}
        try:
            asked = self._client(max_retries=0).send_once("POST", f"{root}/tokenize", body)
            known = json.loads(asyncio.run(asked))
            tokens, longest = known.get("tokens"), known.get("max_model_len")
        except (HttpError, ValueError, AttributeError):
            return
        if tokens is not None and tokens != Tokenizer(student).encode(_SAMPLE):
            raise RunFailed(
                f"{self._where} has another tokenizer than the policy, so it cannot score its "
                "tokens: choose a teacher of the same family, or use its text instead (loss=sft "
                "sampler=transcripts)"
            )
        if isinstance(longest, int) and longest <= max_seq_len:
            raise RunFailed(
                f"{self._where} takes {longest} tokens, one of them behind those that it scores, "
                f"and a row may have max_seq_len={max_seq_len}: start it with --max-model-len "
                f"{max_seq_len + 1} or more, or lower max_seq_len"
            )

    def metrics(self) -> dict[str, float]:
        # Each rank asks for its own rows, and one of them logs.
        return {"train/reference_retries": self._ranks.sum(float(self._retries))}

    def score(self, batches: Sequence[Rows]) -> list[Scored]:
        """Return the scores of all micro-batches; their rows are requested together."""
        questions = [
            (ids.tolist(), row.nonzero()[:, 0].tolist())
            for rows in batches
            for ids, row in zip(rows.token_ids.cpu(), rows.mask.cpu(), strict=True)
        ]
        answers = iter(asyncio.run(self._answers(questions)))
        return [
            joined(
                list(islice(answers, len(rows.mask))),
                lambda scores, device=rows.mask.device: scores.to(device),
            )
            for rows in batches
        ]

    async def _answers(self, questions: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        client = self._client(self._endpoint.max_retries)
        tasks = [asyncio.create_task(self._ask(client, *question)) for question in questions]
        async with client:
            try:
                return await asyncio.gather(*tasks)
            finally:
                self._retries = client.num_retries
                for task in tasks:  # if one failed, the others are not needed
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: HttpClient, token_ids: list[int], places: list[int]) -> Scored:
        """Return the scores of the tokens at `places` of one row."""
        if not places:
            return self._read([], [])
        # Up to the last completion token, because padding and a trailing reply need no score.
        prompt = token_ids[: places[-1] + 1]
        body = {"model": self._endpoint.model, "prompt": prompt, "max_tokens": 1}
        text = ""
        try:
            text = await client.post(self._url, {**body, "prompt_logprobs": self._top_k})
            entries = json.loads(text)["choices"][0].get("prompt_logprobs")
        except HttpError as error:
            problem = str(error)
            if allowed := _ALLOWED.search(error.text):
                problem = (
                    f"gives the {allowed[1]} most likely tokens at most, and reference.top_k="
                    f"{self._top_k}: lower it, or start the server with --max-logprobs "
                    f"{self._top_k}"
                )
            raise RunFailed(f"{self._where} {problem}") from error
        except ValueError as error:
            raise RunFailed(f"{self._where} did not answer with JSON: {text[:200]!r}") from error
        if not entries:
            raise RunFailed(f"{self._where} returns no prompt_logprobs: it must be a vLLM server")
        return self._read([entries[i] for i in places], [token_ids[i] for i in places])

    def _read(self, entries: list[dict[str, Any]], tokens: list[int]) -> Scored:
        """Return tensors of the entries {token: {logprob}} at each place."""
        pairs = zip(entries, tokens, strict=True)
        logprobs = torch.tensor([entry[str(t)]["logprob"] for entry, t in pairs])
        if not self._top_k:
            return Scored(logprobs)
        # vLLM adds the given token to the most likely ones.
        best = [
            sorted(((e["logprob"], int(t)) for t, e in entry.items()), reverse=True)[: self._top_k]
            for entry in entries
        ]
        shape = (len(best), self._top_k)
        ids = torch.tensor([[t for _, t in row] for row in best], dtype=torch.int64).reshape(shape)
        if (ids >= self._vocabulary).any():  # padding of the teacher's vocabulary, rarely likely
            raise RunFailed(
                f"{self._where} names the token {int(ids.max())} as likely, and the policy knows "
                f"{self._vocabulary}: lower reference.top_k, or choose another teacher"
            )
        values = torch.tensor([[value for value, _ in row] for row in best])
        return Scored(logprobs, ids, values.reshape(shape))
