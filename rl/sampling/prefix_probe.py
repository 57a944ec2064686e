"""Tests whether a chat format rewrites earlier turns.

`Renderer.is_prefix_stable` is also False for some formats that keep earlier turns. The test repeats
the steps of a rollout: a prompt, a completion with thinking, and the prompt after a reply.
"""

import logging
from typing import Any

from renderers import Renderer

from envs.messages import assistant, user
from rl.inference.completion import Completion
from rl.model.tokenizer import PlainParser
from rl.sampling.chat import Chat

log = logging.getLogger(__name__)

QUESTION, ANSWER, REPLY = user("How much is 2 + 3?"), assistant("5"), user("And twice that?")
THINKING = {**ANSWER, "reasoning_content": "Two and three make five."}


async def rewrites(chat: Chat, renderer: Renderer) -> bool:
    """Return whether the second turn's prompt fails to begin with all tokens of the first turn."""
    opening = await chat.open([QUESTION], None)
    completion = Completion(
        token_ids=thinking_completion(renderer, opening.token_ids),
        logprobs=[],
        versions=[],
        cut_off=False,
        prompt_ids=opening.token_ids,
    )
    following = await chat.follow(opening, completion, chat.message(opening, completion), [REPLY])
    before = completion.prompt_ids + completion.token_ids
    return following.token_ids[: len(before)] != before


def thinking_completion(renderer: Renderer, prompt_ids: list[int]) -> list[int]:
    """Return the tokens of a test completion with thinking, stop token included."""
    if isinstance(renderer, PlainParser):
        thinking, answer = THINKING["reasoning_content"], ANSWER["content"]
        return renderer.encode(f"<think>\n{thinking}\n</think>\n\n{answer}")
    conversation: Any = [QUESTION, THINKING]
    rendered = renderer.render(conversation)
    ids, owners = rendered.token_ids, rendered.message_indices
    if ids[: len(prompt_ids)] != prompt_ids:  # the prompt opens or closes the thinking block
        start = next(i for i, owner in enumerate(owners) if owner == 1)
    else:
        start = len(prompt_ids)
    stops = set(renderer.get_stop_token_ids())
    end = next((i + 1 for i in range(start, len(ids)) if ids[i] in stops), len(ids))
    return ids[start:end]


def report_rewriting(on_rewrite: str, choices: str) -> None:
    """Warn that history is rewritten; raise ValueError if on_rewrite=refuse."""
    problem = "this chat format drops thinking from earlier turns, so later prompts rewrite history"
    if on_rewrite == "refuse":
        raise ValueError(f"{problem}, and client.on_rewrite=refuse: choose {choices}")
    log.warning("%s: client.on_rewrite=%s (choices: %s)", problem, on_rewrite, choices)
