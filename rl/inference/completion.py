"""The completions that vLLM returns for one prompt, and the errors of failed requests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl.runtime.failure import RunFailed

_MASKED = -9999.0  # vLLM's logprob of a token that top_p, top_k or min_p removed
_MAX_MISSING = 1e-4  # maximum total probability of kept tokens that vLLM does not return


class GenerationError(RunFailed):
    """The error of a failed server. It ends the run, but its subclass RequestFailed does not."""


class RequestFailed(GenerationError):
    """The error of a request after its last attempt. It ends the rollout, but not the run."""


class AttemptFailed(Exception):
    """The error of one attempt at a request. `VLLMClient.request` decides whether to retry."""

    def __init__(self, message: str, *, retryable: bool = True, unanswered: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable  # whether another attempt may succeed
        self.unanswered = unanswered  # whether no answer came, perhaps because vLLM has ended


@dataclass(frozen=True)
class Completion:
    """A completion [N] of a prompt [P]: sampled tokens, tokens given by prefix.py, or both."""

    token_ids: list[int]  # [N] given tokens, if any, then sampled ones with the stop token
    logprobs: list[float]  # [N] logprob under the distribution that vLLM sampled from; 0 if unknown
    versions: list[int]  # [N] policy version of each logprob; -1 if unknown
    cut_off: bool  # whether a token limit, not the policy, ended the completion
    prompt_ids: list[int] = field(default_factory=list)  # [P]
    num_untracked_tokens: int = 0  # number of sampled tokens if the server returns no token ids
    stop: str | None = None  # the stop string (sampler.stop) that ended the completion, if any
    num_masked: int = 0  # number of leading tokens that were given and are not trained
    # For each token, the ids that top_p, top_k and min_p left to sample from; () without limits.
    kept: Sequence[Sequence[int]] = ()


# Decoding into msgspec.Struct types takes a fifth of the time of decoding into dictionaries.
class _LikelyToken(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprob(msgspec.Struct, gc=False):
    logprob: float
    # Leave this JSON undecoded, because vLLM always sends it, but few runs need it.
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


_LIKELY = msgspec.json.Decoder(list[_LikelyToken])


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None


class _VersionSpan(msgspec.Struct, gc=False):
    start: int
    end: int
    version: str | int


class Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None
    logprobs: _Logprobs | None
    finish_reason: str | None
    weight_versions: list[_VersionSpan] | None
    stop_reason: str | int | None = None


class GenerateAnswer(msgspec.Struct, gc=False):
    choices: list[Choice]


def completion_of(choice: Choice, prompt_ids: list[int], returns_kept: bool = False) -> Completion:
    token_ids = choice.token_ids or []
    content = (choice.logprobs and choice.logprobs.content) or []
    if choice.finish_reason in ("abort", "error"):
        # Refuse aborted completions, because their reward would punish the policy for vLLM's error.
        raise AttemptFailed(f"vLLM ended a completion with finish_reason={choice.finish_reason}")
    versions = [-1] * len(token_ids)
    for span in choice.weight_versions or []:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    if len(content) != len(token_ids) or -1 in versions:
        raise AttemptFailed(
            f"vLLM returned {len(token_ids)} tokens with {len(content)} logprobs and weight "
            f"versions {choice.weight_versions}, but every token needs both: use the version of "
            "vLLM in pyproject.toml"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=[entry.logprob for entry in content],
        versions=versions,
        cut_off=choice.finish_reason == "length",
        prompt_ids=prompt_ids,
        stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        kept=[_kept_tokens(entry.top_logprobs) for entry in content] if returns_kept else (),
    )


def _kept_tokens(top_logprobs: msgspec.Raw) -> list[int]:
    """Return the tokens that sampling kept. Raise GenerationError if vLLM did not return all."""
    likely = _LIKELY.decode(top_logprobs)
    kept = [each for each in likely if each.logprob > _MASKED]
    total = math.fsum(math.exp(each.logprob) for each in kept)
    if total < 1 - _MAX_MISSING:
        raise GenerationError(
            f"vLLM sampled from more tokens than the {len(likely)} that it returned, which have "
            f"only {total:.6f} of the probability, probably because many logits are equal: set "
            "model.head_dtype=float32, or lower sampler.top_k"
        )
    return [each.token_id for each in kept]


def scoring_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for the logprobs of given tokens, at temperature 1."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(token_ids), "sampling_params": sampling}


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return each token's logprob, except the first's, from the answer to `scoring_request`."""
    pairs = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True)
    return [entry[str(token)]["logprob"] for entry, token in pairs]
