"""A sampler that ends a turn at its first tool call.

If the policy continues after a call, it does not know the tool's answer yet: it makes a second call
by guess, or invents an answer. With this sampler, the end of a turn's first call ends the turn.

The policy still samples this last token from all tokens. Unlike temperature or top_p, this changes
no probability, so ratios stay exact.
"""

from dataclasses import dataclass
from functools import cache

from renderers import Renderer

from envs.messages import tool_call
from rl.sampling.demonstrations import completion_ids
from rl.sampling.sampler import PolicySampler


@dataclass(frozen=True, kw_only=True)
class OneCallSampler(PolicySampler):
    """A PolicySampler whose turns may end at their first tool call.

    Attributes:
        one_call: whether a turn ends at its first call. False: as in PolicySampler.
    """

    one_call: bool

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters. Every turn calls this method, so it must be fast."""
        parameters = super().sampling(renderer)
        if not self.one_call:
            return parameters
        return {
            **parameters,
            "stop_token_ids": [*renderer.get_stop_token_ids(), end_of_call(renderer)],
        }


@cache
def end_of_call(renderer: Renderer) -> int:
    """Return the token that ends a tool call in the model's format, `</tool_call>` for Qwen3."""
    *_, last, _end_of_turn = completion_ids(renderer, tool_call("any"))
    return last
