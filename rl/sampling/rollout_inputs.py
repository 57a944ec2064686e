"""The inputs of one rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from envs.episode import Example
from envs.messages import Message
from envs.protocol import Environment
from rl.inference.completion import Completion
from rl.sampling.chat import Prompt
from rl.sampling.clock import Clock
from rl.sampling.prefix import Prefix
from rl.sampling.sampler import RequestSeeds


@dataclass
class RolloutInputs:
    """The inputs of one rollout. The rollouts of a group may share `prompt`."""

    env: Environment
    example: Example
    clock: Clock
    seeds: RequestSeeds
    prepare: Callable[[Sequence[Message]], list[Message]]  # adds the system prompt, and a hint
    prompt: Prompt | None = None  # first prompt; None until it is rendered
    opening: Completion | None = None  # first completion, from the request that the group shared
    prefix: Prefix | None = None  # the turns with which the rollout begins

    def change_example(self, example: Example, hint: str | None) -> None:
        """Set example and hint. `hint`: a text; "" for the example's own hint; None for no hint."""
        env, self.prompt = self.env, None
        self.example = replace(example, info={**example.info, "hint": hint}) if hint else example
        if hint is not None:
            # A copy, because the episode appends to the list that the environment returns.
            self.prepare = lambda messages: [
                *env.teacher_messages(self.example, env.add_system_prompt(messages))
            ]
