"""Which prompts leave room for an answer, found out before the first rollout.

A prompt that fills max_seq_len gives a rollout without a token: nothing is learned from it, and it
would be the first to finish. Such examples are left out of the order, and counted aloud.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.episode import Example
from envs.protocol import Environment, Pool
from rl.sampling.chat import Chat

log = logging.getLogger(__name__)

_WRAP = 64  # tokens that a format puts around one message, generously


@dataclass(frozen=True)
class _Chosen(Sequence[Example]):
    """Some of the examples; they are made when they are asked for, as data sets make theirs."""

    examples: Sequence[Example]
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.examples[self.indices[index]]


def fitting(env: Environment, pools: Sequence[Pool], chat: Chat, max_seq_len: int) -> list[Pool]:
    """Return the pools without the examples whose prompt leaves no room for an answer.

    Raises:
        ValueError: none of a pool's prompts does.

    """
    return [_fitting(env, pool, chat, max_seq_len) for pool in pools]


def _fitting(env: Environment, pool: Pool, chat: Chat, max_seq_len: int) -> Pool:
    lengths = _Lengths(env, chat, max_seq_len)
    long = {i: n for i, e in enumerate(pool.examples) if (n := lengths.too_long(e))}
    if not long:
        return pool
    total, name = len(pool.examples), pool.examples[0].env
    described = lengths.described(pool.examples[0])
    schemas = f", {described} of them the tools' schemas" if described else ""
    remedy = f"raise model.max_seq_len (max_seq_len={max_seq_len})" + (
        ", or leave the schemas out (model.describe_tools=false)" if described else ""
    )
    if len(long) == total:
        raise ValueError(
            f"all {total} prompts of env {name!r} fill max_seq_len, so nothing can be answered: "
            f"the shortest has {min(long.values())} tokens{schemas}: {remedy}"
        )
    log.warning(
        "%d of %d prompts of env %r fill max_seq_len and are left out: the longest has %d "
        "tokens%s: %s",
        *(len(long), total, name, max(long.values()), schemas, remedy),
    )
    return replace(
        pool, examples=_Chosen(pool.examples, [i for i in range(total) if i not in long])
    )


class _Lengths:
    """Measures prompts; those that are short by any account are not tokenized."""

    def __init__(self, env: Environment, chat: Chat, max_seq_len: int) -> None:
        self._env, self._chat, self._limit = env, chat, max_seq_len
        self._schemas: dict[str, int] = {}  # tokens, by environment

    def too_long(self, example: Example) -> int:
        """Return the tokens of a prompt that leaves no room; 0 for one that does, or may."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # it has a prompt of its own
            return 0
        try:
            # No token is less than a byte.
            texts = [len(str(m.get("content") or "").encode()) for m in example.messages]
            if self.described(example) + sum(texts) + _WRAP * (len(texts) + 1) < self._limit:
                return 0
            length = self._chat.measure(list(example.messages), env.tool_specs)
        except Exception:  # noqa: BLE001 an example that cannot be rendered is its rollouts' error
            return 0
        return length if length is not None and length >= self._limit else 0

    def described(self, example: Example) -> int:
        """Tokens of the tools' schemas in a prompt."""
        env = self._env.environment_of(example)
        if env.name not in self._schemas:
            empty = [{"role": "user", "content": ""}]
            both = [self._chat.measure(empty, specs) for specs in (env.tool_specs, None)]
            self._schemas[env.name] = (both[0] or 0) - (both[1] or 0)
        return self._schemas[env.name]
