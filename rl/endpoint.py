"""A teacher behind another vLLM server: its logprobs of given tokens are the reference's.

B: rows, T: padded length, N: completion tokens of a micro-batch.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import torch
from torch import Tensor

from rl.failure import RunFailed
from rl.objective import Batch
from rl.reference import Reference, Setting, Unchanging

_AT_ONCE = 32  # requests in flight


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """conf/reference/endpoint.yaml: another vLLM, asked for the logprobs of given tokens.

    Attributes:
        url: of its OpenAI-compatible API, with /v1.
        model: the name it serves the teacher under.
        timeout: seconds for one row.

    """

    url: str
    model: str
    timeout: float

    def start(self, setting: Setting) -> Reference:
        """Connect at the first batch."""
        assert setting.temperature == 1, "refused by rl/algorithm_rules.py"
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
