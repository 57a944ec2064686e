"""Play environments that need a real event loop, with a scripted engine."""

import asyncio
from dataclasses import replace
from typing import Any

from envs.verifiers.environment import Verifiers
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.records import Rollout
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import SAMPLER, ScriptedClient, tiny_renderer, tiny_tokenizer

# The end of the second prompt of a letter game after the first turn aaBB.
TWO_TURNS = (
    "<|im_start|>assistant\naaBB<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TOKENIZER = tiny_tokenizer()


class WritingClient(ScriptedClient):
    """A scripted engine whose answers may contain the text of special tokens."""

    def _next(self, prompt: list[int], max_tokens: int, version: int) -> Completion:
        answer = self.answers[min(self.given, len(self.answers) - 1)]
        self.given += 1
        ids = TOKENIZER.encode(f"{answer}<|im_end|>")
        kept = ids[:max_tokens]
        cut_off = len(kept) < len(ids)
        return Completion(kept, [-1.0] * len(kept), [version] * len(kept), cut_off, prompt)


def bridge(env_id: str, **changes: Any) -> Verifiers:
    """An environment of the library, with all its examples."""
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": None}
    return Verifiers(id=env_id, **{**options, **changes})


def play(
    env: Verifiers,
    *answers: str,
    size: int = 1,
    max_seq_len: int = 1024,
    max_tokens: int = SAMPLER.max_tokens,
) -> tuple[tuple[Rollout, ...], ScriptedClient]:
    """Return the rollouts of the first training example, and the engine."""
    client, sampler = WritingClient(*answers), replace(SAMPLER, max_tokens=max_tokens)
    chat = RendererChat(sampler, tiny_renderer(), client, max_seq_len, LiveVersion(7))
    player = Player(sampler, env, chat)
    return asyncio.run(player.play_group(0, env.examples("train")[0], size)), client


def prompt_texts(client: ScriptedClient) -> list[str]:
    """Return the prompts that the engine received."""
    return [TOKENIZER.decode(ids) for ids, *_ in client.requests]


def said(rollout: Rollout) -> str:
    """The tokens that the policy chose, all in one row, special ones left out."""
    (row,) = rollout.rows
    return TOKENIZER.decode(row.token_ids[row.completion_mask].tolist(), skip_special_tokens=True)
