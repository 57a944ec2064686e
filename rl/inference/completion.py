"""What vLLM returns for one prompt, and the errors of a request that failed."""

from dataclasses import dataclass, field
from typing import Any

from rl.runtime.failure import RunFailed

_BROKEN_OFF = ("abort", "error")  # finish reasons that vLLM causes, not the policy


class GenerationError(RunFailed):
    """The server cannot be used; the message is for the user."""


class RequestFailed(GenerationError):
    """One request failed after all retries; it costs its rollout, not the run."""


class AttemptFailed(Exception):
    """One attempt at a request failed."""

    def __init__(self, message: str, *, passing: bool = True, broken: bool = False) -> None:
        super().__init__(message)
        self.passing = passing  # another attempt may succeed
        self.broken = broken  # there was no answer, so the server may be gone


@dataclass(frozen=True)
class Completion:
    """What the server sampled after one prompt. P tokens of the prompt, N sampled ones."""

    token_ids: list[int]  # [N] with the stop token
    logprobs: list[float]  # [N] under the distribution that was sampled from
    versions: list[int]  # [N] policy version that sampled each token
    cut_off: bool  # max_tokens ended it, not the policy
    prompt_ids: list[int] = field(default_factory=list)  # [P]
    num_untracked_tokens: int = 0  # sampled by a server that returns no token ids
    stop: str | None = None  # the text of sampler.stop that ended it; its tokens are included


def completion_of(choice: dict[str, Any], prompt_ids: list[int]) -> Completion:
    """Return one choice of vLLM's answer to a prompt.

    AttemptFailed if vLLM broke it off, or if a token has no logprob or no version.
    """
    token_ids: list[int] = choice["token_ids"] or []
    content: list[dict[str, Any]] = (choice["logprobs"] or {}).get("content") or []
    if choice["finish_reason"] in _BROKEN_OFF:
        # Training on it would penalise the policy for where vLLM stopped.
        raise AttemptFailed(f"vLLM ended a completion with finish_reason={choice['finish_reason']}")
    versions = [-1] * len(token_ids)
    for span in choice["weight_versions"] or []:
        count = span["end"] - span["start"]
        versions[span["start"] : span["end"]] = [int(span["version"])] * count
    if len(content) != len(token_ids) or -1 in versions:
        raise AttemptFailed(
            f"vLLM returned {len(token_ids)} tokens with {len(content)} logprobs and weight "
            f"versions {choice['weight_versions']}: every token needs both"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=[entry["logprob"] for entry in content],
        versions=versions,
        cut_off=choice["finish_reason"] == "length",
        prompt_ids=prompt_ids,
        stop=stop if isinstance(stop := choice.get("stop_reason"), str) else None,
    )
