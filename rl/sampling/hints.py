"""What a reference with `sees_hint` gets to see in the place of the policy's prompts.

A row begins with a prompt and goes on with what the policy chose and what it was answered. The
reference scores the same choices after a prompt of its own, which holds the hint: all that follows
is the policy's row, token for token. A fork begins with a prompt of its own and gets one here, too.
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
    _newest: tuple[Prompt, list[int]] | None = None  # the rollouts of a group share their opening

    async def __call__(self, prompt: Prompt) -> list[int]:
        """Return the tokens that stand for a prompt which begins a row."""
        if self._newest is None or self._newest[0] is not prompt:
            with as_environment_error(self.env, "teacher_messages"):
                messages = self.env.teacher_messages(self.example, list(prompt.messages))
                hinted = await self.chat.open(messages, prompt.tools)
            self._newest = prompt, hinted.token_ids
        return self._newest[1]


def require_hints(env: Environment, pools: Sequence[Pool], hinted_envs: frozenset[str]) -> None:
    """Ask every example of these environments for its hint once, before any of them is played.

    Raises:
        ValueError: one has none.

    """
    for pool in pools:
        if not pool.examples or pool.examples[0].env not in hinted_envs:
            continue
        for example in pool.examples:
            env.environment_of(example).teacher_messages(example, list(example.messages))
