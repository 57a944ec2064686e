"""Test whether a chat format changes earlier turns in later prompts (Qwen3 drops thinking).

`Renderer.is_prefix_stable` is False even for some formats that keep earlier turns. So the test
renders two turns of a rollout: a prompt, a completion with thinking, and the prompt after a reply.
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


async def rewrites_history(chat: Chat, renderer: Renderer) -> bool:
    """Return whether the prompt of turn two changes tokens of turn one."""
    opening = await chat.first_prompt([QUESTION], None)
    token_ids = completion_with_thinking(renderer, opening.token_ids)
    completion = Completion(token_ids, [], [], cut_off=False, prompt_ids=opening.token_ids)
    message = chat.message(opening, completion)
    following = await chat.next_prompt(opening, completion, message, [REPLY])
    before = completion.prompt_ids + completion.token_ids
    return following.token_ids[: len(before)] != before


def completion_with_thinking(renderer: Renderer, prompt_ids: list[int]) -> list[int]:
    """Return the tokens that a policy samples if it answers `THINKING`, stop token included."""
    if isinstance(renderer, PlainParser):
        thinking, answer = THINKING["reasoning_content"], ANSWER["content"]
        return renderer.encode_completion(f"<think>\n{thinking}\n</think>\n\n{answer}")
    conversation: Any = [QUESTION, THINKING]
    rendered = renderer.render(conversation)
    ids, owners = rendered.token_ids, rendered.message_indices
    if ids[: len(prompt_ids)] != prompt_ids:  # the format adds think tokens to prompts only
        start = next(i for i, owner in enumerate(owners) if owner == 1)
    else:
        start = len(prompt_ids)
    stops = set(renderer.get_stop_token_ids())
    end = next((i + 1 for i in range(start, len(ids)) if ids[i] in stops), len(ids))
    return ids[start:end]


def report_rewriting(on_rewrite: str, choices: str) -> None:
    """Warn that the chat format changes earlier turns; raise ValueError if on_rewrite=refuse."""
    problem = "the chat format drops the thinking of earlier turns from later prompts"
    if on_rewrite == "refuse":
        raise ValueError(f"{problem}, but client.on_rewrite=refuse: set it to {choices}")
    log.warning("%s: client.on_rewrite=%s applies. Choices: %s", problem, on_rewrite, choices)
