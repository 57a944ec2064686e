"""Texts that end a turn: `sampler.stop`.

    sampled    The answer is 5.</answer>    trained on, all of it: the policy chose these tokens
    message    The answer is 5.             what the environment reads, as from any OpenAI server
    history    The answer is 5.</answer>    what the policy sees of itself in its next turn

vLLM stops at the token that completes the text, which may begin within a token and end within one.
"""

from typing import Any, cast

from renderers import Renderer

from rl.inference.completion import Completion
from rl.model.tokenizer import Tokenizer


def before_stop(renderer: Renderer, completion: Completion) -> list[int]:
    """Return the tokens of a completion up to its stop text, whose first token may be cut."""
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # where every family keeps ours
    token_ids = completion.token_ids
    text, stop, _ = tokenizer.decode(token_ids).partition(completion.stop or " ")
    if not stop:
        return token_ids  # decoded one by one they had it, and together they do not
    for end in range(len(token_ids), -1, -1):
        head = tokenizer.decode(token_ids[:end])
        if text.startswith(head):
            return [*token_ids[:end], *tokenizer.encode(text[len(head) :])]
    raise AssertionError("no tokens are no text, with which every text begins")
