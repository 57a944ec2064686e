"""A teacher behind another vLLM server, asked for the logprobs of given tokens.

One request a row: the tokens are its prompt, and `prompt_logprobs` says what it thinks of each of
them, with the top_k most likely ones where a loss compares distributions.

N: completion tokens of a micro-batch, K: top_k.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import httpx
import torch
from torch import Tensor

from rl.learner.ranks import Ranks
from rl.learner.reference.protocol import Reference, ReferenceSetting, Unchanging
from rl.learner.rows import Rows, Scores
from rl.model.tokenizer import Tokenizer
from rl.run.failure import RunFailed
from rl.run.http_status import may_pass

_AT_ONCE = 32  # requests in flight
_SAMPLE = "Tokenizers differ: 3.14159 naïve ideas, 東京 + café; def f(x):\n\treturn x**2  # 100%"
_ALLOWED = re.compile(r"prompt logprobs of \d+, which is greater than max allowed: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """conf/reference/endpoint.yaml: another vLLM, asked for the logprobs of given tokens.

    Attributes:
        url: of its OpenAI-compatible API, with /v1.
        model: the name it serves the teacher under.
        timeout: seconds for one row.
        max_retries: further attempts at a row that got no answer, or one that blames the server.
        top_k: candidates at each token, where a loss compares distributions.
        sees_hint: its prompts hold the hints of the examples (rl/sampling/hints.py).

    """

    only_temperature_1: ClassVar[bool] = True

    url: str
    model: str
    timeout: float
    max_retries: int
    top_k: int
    sees_hint: bool

    def start(self, setting: ReferenceSetting) -> Reference:
        """Ask what tokens the server knows; what else is wrong shows at the first batch."""
        assert setting.temperature == 1, "refused by rl/config/reference_rules.py"
        top_k = setting.num_candidates(self.top_k)
        remote = _Remote(self, top_k, setting.vocabulary, setting.policy.ranks)
        remote.require_fit(setting.model, setting.max_seq_len)
        return remote


class _Remote(Unchanging):
    def __init__(self, endpoint: Endpoint, top_k: int, vocabulary: int, ranks: Ranks) -> None:
        self._endpoint, self._top_k, self._vocabulary = endpoint, top_k, vocabulary
        self._ranks = ranks
        self._where = f"reference.url={endpoint.url}"
        self._url = f"{endpoint.url.rstrip('/')}/completions"
        self._http = httpx.Client(timeout=endpoint.timeout)
        self._retries: list[str] = []  # what went wrong, of the last call; appending is atomic

    def require_fit(self, student: Path, max_seq_len: int) -> None:
        """Refuse a server that cuts a text into other tokens than the policy in folder `student`.

        Or that has no room for a row of `max_seq_len` of them. One that says neither is taken at
        its word, one that is not up yet as well.
        """
        root = self._endpoint.url.rstrip("/").removesuffix("/v1")
        body = {"model": self._endpoint.model, "prompt": _SAMPLE, "add_special_tokens": False}
        try:
            answer = self._http.post(f"{root}/tokenize", json=body)
            known = answer.json() if answer.status_code == httpx.codes.OK else {}
            tokens, longest = known.get("tokens"), known.get("max_model_len")
        except (httpx.HTTPError, ValueError, AttributeError):
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
        return {"train/reference_retries": self._ranks.sum(float(len(self._retries)))}

    def score(self, batches: Sequence[Rows]) -> list[Scores]:
        """Ask for the rows of all micro-batches together: the server waits for none of ours."""
        self._retries = []
        questions = [
            (ids.tolist(), row.nonzero()[:, 0].tolist())
            for rows in batches
            for ids, row in zip(rows.token_ids.cpu(), rows.mask.cpu(), strict=True)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = pool.map(lambda question: self._ask(*question), questions)
            return [
                _joined(list(islice(answers, len(rows.mask))), rows.mask.device) for rows in batches
            ]

    def _ask(self, token_ids: list[int], places: list[int]) -> Scores:
        """What it thinks of the tokens at `places` of one row."""
        if not places:
            return self._read([], [])
        # Up to the last token that counts: padding and a trailing reply are not worth scoring.
        prompt = token_ids[: places[-1] + 1]
        body = {"model": self._endpoint.model, "prompt": prompt, "max_tokens": 1}
        answer = self._answer({**body, "prompt_logprobs": self._top_k})
        entries = answer["choices"][0].get("prompt_logprobs")
        if not entries:
            raise RunFailed(f"{self._where} returns no prompt_logprobs: it must be a vLLM server")
        return self._read([entries[i] for i in places], [token_ids[i] for i in places])

    def _read(self, entries: list[dict[str, Any]], tokens: list[int]) -> Scores:
        """Tensors of what stands at each place: {token: {logprob}}, the given one included."""
        pairs = zip(entries, tokens, strict=True)
        logprobs = torch.tensor([entry[str(t)]["logprob"] for entry, t in pairs])
        if not self._top_k:
            return Scores(logprobs)
        # The given token stands beside the most likely ones unless it is one of them.
        best = [
            sorted(((e["logprob"], int(t)) for t, e in entry.items()), reverse=True)[: self._top_k]
            for entry in entries
        ]
        shape = (len(best), self._top_k)
        ids = torch.tensor([[t for _, t in row] for row in best], dtype=torch.int64).reshape(shape)
        if (ids >= self._vocabulary).any():  # padding of its own, and hardly ever likely
            raise RunFailed(
                f"{self._where} names the token {int(ids.max())} as likely, and the policy knows "
                f"{self._vocabulary}: lower reference.top_k, or choose another teacher"
            )
        values = torch.tensor([[value for value, _ in row] for row in best])
        return Scores(logprobs, ids, values.reshape(shape))

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
                if not may_pass(answer.status_code):
                    break  # it is the question, and would be the same one again
            except (httpx.HTTPError, ValueError) as error:  # ValueError: a body cut short
                problem = f"did not answer ({type(error).__name__}: {error})"
        if allowed := _ALLOWED.search(problem):
            problem = (
                f"gives the {allowed[1]} most likely tokens at most, and reference.top_k="
                f"{self._top_k}: lower it, or start the server with --max-logprobs {self._top_k}"
            )
        raise RunFailed(f"{self._where} {problem}")


def _joined(parts: Sequence[Scores], device: torch.device) -> Scores:
    """The rows of a micro-batch, one after the other."""

    def join(tensors: list[Tensor | None]) -> Tensor | None:
        known = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(known).to(device) if known else None

    logprobs = join([part.logprobs for part in parts])
    assert logprobs is not None, "a micro-batch has a row"
    return Scores(
        logprobs,
        join([part.candidates for part in parts]),
        join([part.candidate_logprobs for part in parts]),
    )
