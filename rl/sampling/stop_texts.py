"""Cuts a completion at its stop text: `sampler.stop`.

    sampled    The answer is 5.</answer>    trained on, because the policy chose these tokens
    message    The answer is 5.             what the environment reads, as in the OpenAI API
    history    The answer is 5.</answer>    what the policy sees in its next turn

vLLM stops at the token that completes the text. The text may begin and end within a token.
"""

from typing import Any, cast

from renderers import Renderer

from rl.inference.completion import Completion
from rl.model.tokenizer import Tokenizer


def before_stop(renderer: Renderer, completion: Completion) -> list[int]:
    """Return the tokens of a completion before its stop text; a token may be split."""
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # where every renderer family stores it
    token_ids = completion.token_ids
    text, stop, _ = tokenizer.decode(token_ids).partition(completion.stop or " ")
    if not stop:
        return token_ids  # only the tokens decoded one by one contain it
    for end in range(len(token_ids), -1, -1):
        head = tokenizer.decode(token_ids[:end])
        if text.startswith(head):
            return [*token_ids[:end], *tokenizer.encode(text[len(head) :])]
    raise AssertionError("the empty text is a prefix of every text")
