"""Prompts with a hint, for a reference with `sees_hint`.

A row begins with a prompt, and continues with the policy's tokens and the environment's replies.
The reference scores the same tokens after another prompt, which holds the hint. A fork begins with
a new prompt, so it gets a hinted prompt, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.episode import Example
from envs.protocol import Environment, Pool
from rl.sampling.chat import Chat, Prompt
from rl.sampling.environment_errors import as_environment_error


@dataclass
class Hints:
    """Renders the hinted prompts of one group's rollouts."""

    chat: Chat
    env: Environment
    example: Example
    _newest: tuple[Prompt, list[int]] | None = (
        None  # cached, because the rollouts of a group share their first prompt
    )

    async def __call__(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the hinted prompt for a prompt that begins a row."""
        if self._newest is None or self._newest[0] is not prompt:
            with as_environment_error(self.env, "teacher_messages"):
                messages = self.env.teacher_messages(self.example, list(prompt.messages))
                hinted = await self.chat.open(messages, prompt.tools)
            self._newest = prompt, hinted.token_ids
        return self._newest[1]


def require_hints(env: Environment, pools: Sequence[Pool], hinted_envs: frozenset[str]) -> None:
    """Raise ValueError if an example of these environments has no hint, before any is played."""
    for pool in pools:
        if not pool.examples or pool.examples[0].env not in hinted_envs:
            continue
        for example in pool.examples:
            env.environment_of(example).teacher_messages(example, list(example.messages))
