"""Provide a scripted engine and environment, and a Player with Qwen3's renderer."""

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from renderers import Renderer

from envs.episode import Example
from envs.protocol import Environment
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.model.tiny import TinyModel
from rl.model.tokenizer import Tokenizer, load_renderer
from rl.records import Rollout, TrainingRow
from rl.sampling.chat import ChatSettings
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from rl.sampling.sampler import PolicySampler
from rl.sampling.strategy import Independent, Strategy
from tests.support.world import run_virtually

IM_END = 258  # a byte's token is the byte, then <|endoftext|> <|im_start|> <|im_end|>
PREFIX = len("Xuser\nhiX\nXassistant\n")  # tokens of the prompt HI, X a special token
HI = ({"role": "user", "content": "hi"},)
SAMPLER = PolicySampler(
    max_staleness=1,
    max_concurrent=64,
    temperature=0.5,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    max_tokens=32,
    max_prompt_len=None,
    stop=(),
    seeded=False,
    rollout_timeout=60.0,
    allow_biased_ratio=False,
    max_retries=0,
)


def tiny_model(folder: Path) -> Path:
    """Return the folder of a tiny model with configuration and tokenizer, without weights."""
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    rest = {"max_seq_len": 256, "max_tokens": 32, "learning_rate": 1e-3, "warm_start": None}
    rest |= {"describe_tools": True, "rope_theta": 100.0, "tokenizer": None}
    return TinyModel(**sizes, dtype="float32", head_dtype=None, **rest).prepare(folder / "model")


@cache
def tiny_renderer() -> Renderer:
    """Return Qwen3's renderer with the tiny model's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return load_renderer(tiny_model(Path(folder)), "qwen3")


@cache
def tiny_tokenizer() -> Tokenizer:
    """Encode a text; special tokens in it become tokens, because a policy may sample them."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer(tiny_model(Path(folder)))


class ScriptedClient:
    """Return `answers[i]`, a text or token ids, as the i-th completion, then the last one."""

    def __init__(self, *answers: str | list[int] | Exception, seconds: float = 0.0) -> None:
        self.answers, self.seconds = list(answers), seconds
        self.requests, self.scored, self.given = [], [], 0

    def group(self):
        return nullcontext(self)

    async def generate(self, prompt_ids, sampling, *, n, version):
        self.requests.append((list(prompt_ids), sampling, n, version))
        await asyncio.sleep(self.seconds)
        return [self._next(list(prompt_ids), sampling["max_tokens"], version) for _ in range(n)]

    async def score(self, token_ids, count, *, version):
        self.scored.append((list(token_ids), version))
        return [-token / 8 for token in token_ids[len(token_ids) - count :]], version

    def _next(self, prompt: list[int], max_tokens: int, version: int) -> Completion:
        answer = self.answers[min(self.given, len(self.answers) - 1)]
        self.given += 1
        if isinstance(answer, Exception):
            raise answer
        ids = [*answer.encode(), IM_END] if isinstance(answer, str) else answer
        kept = ids[:max_tokens]
        logprobs = [-token / 8 for token in kept]
        return Completion(
            kept, logprobs, [version] * len(kept), cut_off=len(kept) < len(ids), prompt_ids=prompt
        )


class ScriptedEnv(Environment):
    """Score 1 for "good", and reply with `replies`, turn by turn."""

    name = "scripted"
    reward_weights = {"good": 2.0}  # noqa: RUF012 as environments write it

    def __init__(self, replies: tuple[str, ...] = (), max_turns: int = 1) -> None:
        self.replies, self.max_turns = replies, max_turns

    async def reply(self, episode, message):
        if episode.turns > len(self.replies):
            return None
        return [{"role": "user", "content": self.replies[episode.turns - 1]}]

    async def score(self, episode):
        return {"good": float(episode.text == "good"), "length": float(len(episode.text))}


def scoring(score: Callable) -> Environment:
    """Return a single-turn environment with this score."""
    return type("Mine", (ScriptedEnv,), {"score": score})()


def chat_of(
    client: Any,
    sampler: PolicySampler = SAMPLER,
    max_seq_len: int = 256,
    kind: type[RendererChat] = RendererChat,
    **options: Any,
) -> RendererChat:
    """Return a chat with Qwen3's renderer, under version 7."""
    return kind(sampler, tiny_renderer(), client, max_seq_len, LiveVersion(7), **options)


def chat_settings(**changes: Any) -> ChatSettings:
    """Return settings of a chat of several turns under version 7."""
    plain = {"sampler": SAMPLER, "max_seq_len": 256, "is_multi_turn": True, "served_as": "policy"}
    plain |= {"version": LiveVersion(7), "router": Router(), "model": Path(), "renderer": "qwen3"}
    return ChatSettings(**(plain | changes))


def play(
    env: Environment,
    client: Any,
    group_size: int = 1,
    *,
    messages: tuple[dict[str, Any], ...] = HI,
    info: dict[str, Any] | None = None,
    max_seq_len: int = 256,
    sampler: PolicySampler = SAMPLER,
    strategy: Strategy | None = None,
    seed: int | None = None,
    index: int = 0,
    hinted: bool = False,
    kind: type[RendererChat] = RendererChat,
) -> tuple[Rollout, ...]:
    """Return the rollouts of example 3, under version 7, in virtual time.

    `hinted`: whether a reference model sees hints. `kind`: class of the chat.
    """
    chat = chat_of(client, sampler, max_seq_len, kind)
    names = frozenset({env.name} if hinted else ())
    how = {"seed": seed, "strategy": strategy or Independent(), "hinted_envs": names}
    example = Example(id=3, env=env.name, messages=list(messages), info=info or {})
    return run_virtually(Player(sampler, env, chat, **how).play_group(index, example, group_size))


def trained(row: TrainingRow) -> list[int]:
    """Return the tokens of the row that are trained."""
    return row.token_ids[row.completion_mask].tolist()


def text(tokens: Iterable[int]) -> bytes:
    """Return the text of the tokens without special tokens."""
    return bytes(token for token in tokens if token < 256)
