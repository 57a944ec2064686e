"""The inputs of one rollout: environment, example, time limit, seeds and given first tokens."""

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
    env: Environment
    example: Example
    clock: Clock
    seeds: RequestSeeds
    prepare: Callable[[Sequence[Message]], list[Message]]  # adds system prompt and any hint
    prompt: Prompt | None = None  # first prompt, shared by a group; None until rendered
    opening: Completion | None = None  # first completion, from a request for the whole group
    prefix: Prefix | None = None  # tokens with which the first turns must begin

    def change_example(self, example: Example, hint: str | None) -> None:
        """Replace the example by `example`, and show `hint` in its prompt.

        If `hint` is "", the prompt shows the example's own hint; if None, it shows none.
        """
        env, self.prompt = self.env, None
        self.example = replace(example, info={**example.info, "hint": hint}) if hint else example
        if hint is not None:
            # Copy the environment's list, because the episode appends to the list that it gets.
            self.prepare = lambda messages: [
                *env.teacher_messages(self.example, env.add_system_prompt(messages))
            ]
