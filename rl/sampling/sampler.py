"""The options with which a run samples from vLLM (conf/sampler), and the seeds of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from renderers import Renderer

from envs.options import parse_stops
from rl.config.limits import NEUTRAL_SAMPLING, num_returned_tokens
from rl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability


@dataclass(frozen=True, kw_only=True)
class PolicySampler:
    """The options of sampling from vLLM. conf/sampler/async.yaml explains each option."""

    uses_vllm: ClassVar[bool] = True
    max_staleness: NonNegativeInt
    max_concurrent: PositiveInt
    temperature: PositiveFloat
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=-1)]
    min_p: Probability
    repetition_penalty: PositiveFloat
    presence_penalty: float
    frequency_penalty: float
    max_tokens: PositiveInt
    max_prompt_len: PositiveInt | None
    stop: Sequence[str]
    seeded: bool
    rollout_timeout: PositiveFloat
    max_retries: NonNegativeInt
    allow_biased_ratio: bool

    def __post_init__(self) -> None:
        parse_stops(self.stop, "sampler.stop")

    def for_evaluation(self, **changes: Any) -> Self:
        """Return a copy for evaluation, for which vLLM returns only the sampled tokens."""
        return replace(self, allow_biased_ratio=True, **changes)

    def non_default_parameters(self) -> dict[str, Any]:
        """Return a request's options. Omit neutral values, whose keys OpenAI's API may reject."""
        pairs = ((name, getattr(self, name)) for name in NEUTRAL_SAMPLING)
        changed = {name: value for name, value in pairs if value != NEUTRAL_SAMPLING[name]}
        stop = {"stop": list(self.stop)} if self.stop else {}
        return {"temperature": self.temperature, **changed, **stop}

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters, except token limit and seed, which vary by request."""
        returned = num_returned_tokens(vars(self))
        return {
            **({"logprobs": returned} if returned else {}),
            "temperature": self.temperature,
            **{name: getattr(self, name) for name in NEUTRAL_SAMPLING},
            "stop_token_ids": renderer.get_stop_token_ids(),
            # Keep special tokens in the text, because a stop text may contain them.
            **({"stop": list(self.stop), "skip_special_tokens": False} if self.stop else {}),
        }


@dataclass
class RequestSeeds:
    """The seeds of the requests of one rollout: one seed per turn, so that a run can be repeated.

        run seed, group, number in the group, number of retries, turn ---> seed of the request

    If a request samples several completions, completion j gets seed + j. A seed does not depend on
    time or on the order of requests. A copy by `dataclasses.replace` begins with the first turn's
    seed. A repeated run samples equal tokens only if vLLM computes equal logits (conf/sampler).
    """

    seed: int | None  # seed of the run; None: requests have no seed (`sampler.seeded`)
    group: int = 0
    rollout: int = 0  # index of the attempt in its group
    retries: int = 0  # number of failed tries before this one
    _turns: int = field(default=0, init=False)

    def next(self) -> int | None:
        if self.seed is None:
            return None
        key = f"{self.seed}:{self.group}:{self.rollout}:{self.retries}:{self._turns}"
        self._turns += 1
        # Use 7 bytes, so that seed + j stays within the 63 bits that vLLM accepts.
        return int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big")
