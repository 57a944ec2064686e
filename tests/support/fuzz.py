"""Generate malformed completions from a seed, and an engine that returns them."""

from collections.abc import Iterator
from random import Random

from rl.inference.completion import Completion
from tests.support.scripted import IM_END, ScriptedClient, tiny_tokenizer

MARKUP = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</html><script>", "\\boxed{", "####"),
)
NAMES = ('"look"', '"count"', '"nobody"', '["look"]', "{}", "null", "7", "true", '""', '"\\ud800"')
NUMBERS = ("NaN", "-Infinity", "1e999", "-0", "1e-999", "9" * 30, "0x1f", "--1", ".5", "1.", "٣²")
TEXTS = (
    *("\\ud800", "\\udfff\\ud83d", "\\u0000", "\\u202e", "\x00", "é漢🙂", "\ufffe", "a\\"),
    *("\\x", "<b>", "']]>", "{{said}}", "%s%n", "\r\n\t", "1/0", "a,b", "-", "1,234.5/6"),
)


def texts(rng: Random) -> Iterator[str]:
    """Yield completions as text without end."""
    while True:
        value = _value(rng, 3)
        name = rng.choice(NAMES)
        body = rng.choice((value, f'{{"word": {value}}}', f'{{"times": {value}, "parts": [1]}}'))
        call = f'{{"name": {name}, "arguments": {body}}}'
        kind = rng.randrange(8)
        if kind == 0:
            yield "".join(rng.choice((*MARKUP, *TEXTS, value)) for _ in range(rng.randrange(9)))
        elif kind == 1:  # a truncated call
            whole = f"<tool_call>\n{call}\n</tool_call>"
            yield whole[: rng.randrange(len(whole))]
        elif kind == 2:
            yield f"<think>{rng.choice(TEXTS)}<tool_call>{call}</tool_call>"
        elif kind == 3:
            yield f"<tool_call>{value}</tool_call>"
        else:
            calls = [f"<tool_call>\n{call}\n</tool_call>"] * rng.randint(1, 3)
            yield rng.choice(TEXTS) + "\n".join(calls)


def large_texts() -> list[str]:
    """Return a few large completions: deep nesting, long numbers, 10^5 characters."""
    deep = [f"{'[' * n}{']' * n}" for n in (50, 100, 300, 900, 990, 1100, 5000, 50_000)]
    deep += ['{"a":' * n + "1" + "}" * n for n in (300, 900, 1100)]
    numbers = ["9" * n for n in (300, 310, 4000, 4300, 4301, 100_000)] + ["-" + "9" * 4301]
    values = [*deep, *numbers, f'"{"x" * 100_000}"', '"' + "\\ud800" * 20_000 + '"']
    calls = [f'{{"name": "look", "arguments": {{"word": {value}}}}}' for value in values]
    calls += [f'{{"name": {value}, "arguments": {{}}}}' for value in values[3:]]
    calls += [f'{{"name": "count", "arguments": {{"times": {value}}}}}' for value in numbers]
    wholes = [f"<tool_call>{call}</tool_call>" for call in [*calls, *deep]]
    plain = [c * 100_000 for c in ("9", "{", " ")]
    return [*wholes, *plain, "9,999" * 20_000, "1/" * 50_000, "\\boxed{" * 14_000]


def tokens(text: str, rng: Random) -> list[int]:
    """Return token ids of the text, sometimes with lost and shuffled bytes."""
    if rng.random() < 0.2:
        ids = [byte for byte in text.encode("utf-8", "replace") if rng.random() < 0.95]
        ids += [rng.randrange(265) for _ in range(rng.randrange(4))]
        rng.shuffle(ids)
    else:
        ids = tiny_tokenizer().encode(text)
    return [*ids, IM_END] if rng.random() < 0.9 else ids


class FuzzedClient(ScriptedClient):
    """Return these completions in a loop."""

    def __init__(self, completions: list[list[int]]) -> None:
        super().__init__()
        self._completions = completions

    def _next(self, prompt: list[int], max_tokens: int, version: int) -> Completion:
        ids = self._completions[self.given % len(self._completions)]
        self.given += 1
        cut_off = not ids or ids[-1] != IM_END
        return Completion(ids, [-1.0] * len(ids), [version] * len(ids), cut_off, prompt)


def _value(rng: Random, levels: int) -> str:
    kind = rng.randrange(6 if levels else 3)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return f'"{rng.choice(TEXTS)}"'
    if kind == 2:
        return rng.choice(("true", "null", "{}", "[", "]", "{", '"', "2", '"3"', "undefined"))
    if kind == 3:
        return f"[{', '.join(_value(rng, levels - 1) for _ in range(rng.randrange(3)))}]"
    return f'{{"word": {_value(rng, levels - 1)}, "times": {_value(rng, levels - 1)}}}'
