r"""Compare answers by meaning: 1/2 = \frac{1}{2}, 1,234 = 1234.0, x+1 = 1+x.

This module compares numbers itself, as exact fractions. Other answers are compared with math-verify
(a LaTeX grammar and sympy) in sandboxes (envs/sandbox/sandbox.py), because an expression that the
policy wrote may need unlimited time or memory. A sandbox ends a comparison that takes too long.
"""

import asyncio
import re
from fractions import Fraction

from envs.messages import without_reasoning
from envs.options import PositiveInt
from envs.rewards import NUMBER
from envs.sandbox.sandbox import Limits, MemoryMb, Sandbox, check_sandbox
from envs.tools import ToolError

# The timeout is this multiple of the processor time limit, because the machine may be busy.
CLOCK_PER_CPU = 20
MAX_CHARS = 500  # longer answers of the policy are compared as plain text
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_QUANTITY = re.compile(rf"[$€£]?\s*({_NUMBER.pattern}(?:\s*/\s*\d+)?)(?: [a-zA-Z°]{{2,}}| °)*")
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_MIXED = re.compile(r"([-+]?\d+) (\d+)/(\d+)")
_BRACE = re.compile(r"\\[{}\\]|\\boxed\{|[{}]")
_MARKED = re.compile(r"####\s*(\S[^\n]*)")
_PRELOAD = """
import logging
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
logging.disable()
kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
def read(text):
    return parse("$" + text + "$", kinds, parsing_timeout=None)
def same(gold, answer):
    return bool(verify(read(gold), read(answer), timeout_seconds=None))
assert same("x + 1", "1 + x")
"""


def final_answer(text: str) -> str | None:
    """Return the text's `marked_answer`, else its last number, else None. Ignore the reasoning."""
    text = without_reasoning(text)
    marked = marked_answer(text)
    if marked is not None:
        return marked
    *_, last = [None, *NUMBER.finditer(text)]
    return last and re.sub("[$€£]", "", last[0])


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, else the text after the last ####, else None."""
    opened: list[tuple[int, bool]] = []  # (position after a brace, whether the brace is \boxed{)
    start, answer = -1, None
    for brace in _BRACE.finditer(text):  # one pass, so that the time is linear for any text
        if brace[0] in ("{", r"\boxed{"):
            opened.append((brace.end(), len(brace[0]) > 1))
        elif brace[0] == "}" and opened:
            begin, is_box = opened.pop()
            if is_box and begin > start:
                start, answer = begin, text[begin : brace.start()].strip()
    if answer is not None:
        return answer
    marks = _MARKED.findall(text)
    return marks[-1].strip() if marks else None


def normalise(answer: str) -> str:
    r"""Return the answer in plain notation: \frac{1}{2} becomes 1/2, and \text{cm} becomes cm."""
    answer = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r" \1", answer)
    answer = re.sub(r"\\[,!;: ]|\\left(?![a-z])|\\right(?![a-z])|~", " ", answer)
    answer = answer.replace("{,}", ",").replace("\\$", "$").replace("\u2212", "-")
    answer = _FRACTION.sub(r" \1/\2", answer.strip().rstrip(".").strip())
    if len(answer) > 1 and answer[0] == answer[-1] == "$":
        answer = answer.strip("$")
    return re.sub(r"^([-+]) (?=\d)", r"\1", " ".join(answer.split()))


def number(answer: str) -> Fraction | None:
    """Return the value of a normalised answer if it is a number, perhaps with a unit; else None."""
    if mixed := _MIXED.fullmatch(answer):
        whole, numerator, denominator = (int(part) for part in mixed.groups())
        if denominator == 0:
            return None
        return whole + Fraction(-numerator if answer[0] == "-" else numerator, denominator)
    match = _QUANTITY.fullmatch(answer)
    digits = match[1].replace(",", "").replace(" ", "") if match else ""
    try:
        value, _, divisor = digits.partition("/")
        return Fraction(value) / Fraction(divisor or 1)
    except (ValueError, ZeroDivisionError):
        return None


class Grader:
    """A pool of sandboxes that compare answers. Each sandbox starts at its first use."""

    def __init__(
        self,
        *,
        workers: PositiveInt,
        cpu_seconds: PositiveInt,
        memory_mb: MemoryMb,
        allow_without_landlock: bool,
    ) -> None:
        self._limits = Limits(
            cpu_seconds=cpu_seconds,
            call_timeout=CLOCK_PER_CPU * cpu_seconds,
            memory_mb=memory_mb,
            max_output_chars=100,
            site_packages=True,
            allow_without_landlock=allow_without_landlock,
        )
        self._idle = [Sandbox(self._limits, _PRELOAD) for _ in range(workers)]
        self._free = asyncio.Semaphore(workers)

    def check_machine(self) -> None:
        check_sandbox(self._limits, _PRELOAD)

    async def means_same(self, gold: str, answer: str) -> bool | None:
        """Return whether `answer` means the same as `gold`, the correct one; None if undecided."""
        if len(answer) > MAX_CHARS:
            return answer == gold
        gold, answer = normalise(gold), normalise(answer)
        if gold == answer or not answer:
            return bool(answer)
        values = number(gold), number(answer)
        if None not in values:
            return values[0] == values[1]
        async with self._free:
            sandbox = self._idle.pop()  # the most recently used, whose process usually runs already
            try:
                output = await sandbox.run(f"same({gold!r}, {answer!r})")
            except ToolError:  # the comparison took too long or crashed
                output = ""
            finally:
                self._idle.append(sandbox)
        return {"True": True, "False": False}.get(output.strip())
