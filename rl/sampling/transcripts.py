"""Sampler that reads conversations from files, for supervised training on a teacher's answers.

Each line of a file is a JSON object with `messages`, for example a line of a run's rollout files:

    python train.py loss=sft sampler=transcripts sampler.path="outputs/teacher/rollouts/*.jsonl"

If `sampler.min_reward` is set, lines with a lower `reward` or without a reward are not used.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from random import Random

from envs.episode import StopReason
from envs.loading import read_json_lines
from envs.messages import Message, check_messages
from envs.protocol import Environment
from rl.sampling.demonstrations import ImitationSampler

_warn_once = cache(logging.getLogger(__name__).warning)
_CUT_OFF = {reason.value for reason in StopReason if reason.truncated}
_Conversations = list[tuple[str, list[Message]]]  # (environment or "", messages)


@dataclass(frozen=True, kw_only=True)
class TranscriptSampler(ImitationSampler):
    path: str
    min_reward: float | None

    def __post_init__(self) -> None:
        usable, num_lines = read_conversations(self.path, self.min_reward)
        if not usable:
            problem = self._describe(0, num_lines)
            raise ValueError(f"{problem}: correct sampler.path or sampler.min_reward")

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Yield random conversations of `env` or of no env, endlessly. Without any, use all."""
        pairs, num_lines = read_conversations(self.path, self.min_reward)  # from the cache
        if len(pairs) < num_lines:
            _warn_once(self._describe(len(pairs), num_lines))
        of_env = [messages for name, messages in pairs if name in ("", env.name)]
        usable = of_env or [messages for _, messages in pairs]
        while True:
            yield rng.choices(usable)[0]

    def _describe(self, num_usable: int, num_lines: int) -> str:
        rated = "" if self.min_reward is None else f" and a reward of at least {self.min_reward}"
        counts = f"sampler.path={self.path}: {num_usable} of {num_lines} conversations"
        return f"{counts} have a trainable assistant message at their end{rated}"


@cache
def read_conversations(path: str, min_reward: float | None) -> tuple[_Conversations, int]:
    """Return (environment or "", messages) of each usable line, and the number of all lines.

    A usable conversation ends with an assistant message and, if `min_reward` is set, has at least
    this reward. If the last turn was cut off, its message gets `cut_off`, so that no stop
    token is trained. A conversation that was cut off inside thinking or a tool call, or that has an
    invalid tool call, is left out, because no chat format can render it.
    """
    conversations, num_lines, pattern = _Conversations(), 0, str(Path(path).expanduser())
    for name in sorted(glob(pattern)) or [pattern]:
        for number, record in read_json_lines(Path(name)):
            num_lines += 1
            try:
                messages, reward = record["messages"], record.get("reward")
                env, last = str(record.get("env") or ""), messages[-1] if messages else {}
                is_good = min_reward is None or (reward is not None and reward >= min_reward)
                is_cut_off = record.get("stop_reason") in _CUT_OFF
                is_broken = is_cut_off and (not last.get("content") or last.get("tool_calls"))
                if is_broken or not is_good:
                    continue
                check_messages(messages, f"{name}, line {number}")
                calls = [c for m in messages for c in m.get("tool_calls") or ()]
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{name}, line {number}: write a JSON object with `messages` ({error!r})"
                ) from error
            if last.get("role") == "assistant" and not any("error" in call for call in calls):
                marked = [{**last, "cut_off": True}] if is_cut_off else [last]
                conversations.append((env, [*messages[:-1], *marked]))
    return conversations, num_lines
