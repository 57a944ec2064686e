"""A sampler that ends a turn at its first tool call.

What a policy says behind a call, it says before it knows the answer: a second call on a guess, or
the answer itself, made up. Here the call is the turn's last token.

The token that ends the turn is still the policy's own choice, drawn from all tokens: unlike a
temperature or top_p, this changes no probability, so ratios stay exact.
"""

from dataclasses import dataclass
from functools import cache

from renderers import Renderer

from envs.messages import tool_call
from rl.sampling.demonstrations import completion_ids
from rl.sampling.sampler import PolicySampler


@dataclass(frozen=True, kw_only=True)
class OneCallSampler(PolicySampler):
    """PolicySampler, and a limit on what one turn may do.

    Attributes:
        one_call: whether a turn ends at its first call; False is PolicySampler, for comparison.

    """

    one_call: bool

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters; asked for with every turn, so keep it cheap."""
        parameters = super().sampling(renderer)
        if not self.one_call:
            return parameters
        return {
            **parameters,
            "stop_token_ids": [*renderer.get_stop_token_ids(), end_of_call(renderer)],
        }


@cache
def end_of_call(renderer: Renderer) -> int:
    """Return the token that closes a tool call in this model's format, `</tool_call>` for Qwen3."""
    *_, last, _end_of_turn = completion_ids(renderer, tool_call("any"))
    return last
