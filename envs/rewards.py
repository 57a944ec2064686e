"""Rewards that compare the policy's text with accepted answers or with a pattern.

    exact, f1                                      compare any text with a list of answers
    exact_match, token_f1, contains, number_match  compare the policy's text with info["answer"]
    matches                                        compares the policy's text with a pattern

info["answer"] is a text or a number, or a list of accepted answers. The policy's text is its last
turn without the reasoning. The text is empty if the reasoning is never closed. Rewards that take an
`Episode` are fast, so they are coroutine functions, which run without a thread (envs/threads.py).
"""

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from string import punctuation

import regex

from envs.episode import Episode
from envs.messages import without_reasoning

_LONGEST_S = 1.0  # maximum seconds of a regex match, because a match blocks all other rollouts
# Matches punctuation, except signs, decimal points, and operators and separators before digits.
_DROPPED = re.compile(
    rf"""(?! (?<![\w)]) [-.] \$?\.?\d                       # -5, .5, -.5, -$5
        | (?<=[\w)]) [-+*/^.:=<>] -?\.?\d                 # x+1, 1/2, 1.5, x^-2
        | (?<=(?<![a-z])[a-z]) [-+*/^=<>] -?[a-z](?![a-z]) # x-y, a/b, but not t-shirt, u.s.
        | (?<=\d) , (?=\d) (?!\d\d\d(?!\d)) )              # 1,2 but not 1,234
    [{re.escape(punctuation)}]""",
    re.VERBOSE,
)
_ARTICLES = re.compile(r"(?<![-+*/^.:=<>])\b(a|an|the)\b(?![-+*/^.:=<>])")
_TO_DECIMAL = str.maketrans("\u2212", "-", "$€£,")
NUMBER = re.compile(
    r"""(?: (?<![\w.)]) [-\u2212] [$€£]? )?      # a sign, but not the minus of 10-3
    (?: (?<!\d)(?<!\d/) (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)?
      | (?<![\w.]) \.\d+ )                       # a number without leading digit: .5
    (?: [eE][-\u2212+]?\d{1,3}(?!\w) | /(?P<denominator>[1-9]\d*)(?![\d/]) )?""",
    re.VERBOSE,
)


def normalise(text: str) -> str:
    """Return text in the form that SQuAD compares: lower case, no punctuation, no articles.

    Unlike SQuAD, keep punctuation that changes a number or a formula, as in -5, 1.5, 1/2 and x+y.
    """
    return " ".join(_ARTICLES.sub(" ", _without_punctuation(text.lower())).split())


def exact(text: str, answers: Sequence[str]) -> float:
    """Return 1 if `text` equals an answer after `normalise`, else 0.

    `normalise` leaves nothing of answers such as "A" or "<". The comparison then removes only
    punctuation or, if this leaves nothing, only spaces at both ends. Case is always ignored.
    """
    pairs = (_comparable(text, answer) for answer in _as_list(answers))
    return float(any(said == expected for said, expected in pairs))


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the highest word F1 (0..1) of `text` and an answer, normalised as in `exact`."""
    return max((_f1(text, answer) for answer in _as_list(answers)), default=0.0)


def final_text(episode: Episode) -> str:
    """Return the policy's last turn without reasoning; empty if the reasoning has no end."""
    return without_reasoning(episode.text).strip()


def answers_of(episode: Episode) -> list[str]:
    """Return all accepted answers as text. Raise ValueError if the example has no answer."""
    info = episode.example.info
    if "answer" not in info:
        raise ValueError(
            f"example {episode.example.id} has no info['answer'] to compare with: set "
            "env.dataset.answer to the name of the answer's column"
        )
    answer = info["answer"]
    return [str(one) for one in answer] if isinstance(answer, list | tuple) else [str(answer)]


async def exact_match(episode: Episode) -> float:
    """Return 1 if the policy's text equals an accepted answer, as in `exact`, else 0."""
    return exact(final_text(episode), answers_of(episode))


async def token_f1(episode: Episode) -> float:
    """Return the highest word F1 (0..1) of the policy's text and an accepted answer."""
    return f1(final_text(episode), answers_of(episode))


async def contains(episode: Episode) -> float:
    """Return 1 if the policy's text contains an answer as whole normalised words, else 0.

    An answer of only articles and punctuation, such as "A", is ignored, because `normalise` leaves
    nothing of it. Use exact_match for such answers.
    """
    text = f" {normalise(final_text(episode))} "
    phrases = (normalise(answer) for answer in answers_of(episode))
    return float(any(f" {words} " in text for words in phrases if words))


async def number_match(episode: Episode, *, tolerance: float) -> float:
    """Return 1 if the text's last number differs by at most `tolerance` from an answer, else 0.

    A number may have a sign (also U+2212), commas between thousands, decimals (.5), and either a
    denominator (3/4) or an exponent (1e5). Text around it is ignored: 50 % and 50 km count as 50.
    """
    answers, value = answers_of(episode), _last_number(final_text(episode))
    targets = [number for number in map(_last_number, answers) if number is not None]
    if not targets:
        raise ValueError(f"the answer {answers} has no number: use the reward exact_match")
    # Use Decimal, because the floats 1.1 and 1.0 differ by more than 0.1.
    bound = Decimal(str(tolerance))
    return float(value is not None and any(abs(value - number) <= bound for number in targets))


async def matches(episode: Episode, *, pattern: str) -> float:
    """Return 1 if `pattern` matches the whole last turn without its reasoning, else 0.

    A dot in `pattern` also matches a line break. Raise ValueError if the match takes too long: for
    some patterns the time grows exponentially with the length of a text.
    """
    try:
        found = regex.fullmatch(pattern, final_text(episode), regex.DOTALL, timeout=_LONGEST_S)
    except TimeoutError as error:
        raise ValueError(f"pattern={pattern} took over {_LONGEST_S} s: simplify it") from error
    return float(found is not None)


def _without_punctuation(text: str) -> str:
    return _DROPPED.sub("", text.replace("\u2212", "-"))


def _as_list(answers: Sequence[str]) -> Sequence[str]:
    return [answers] if isinstance(answers, str) else answers


def _comparable(text: str, answer: str) -> tuple[str, str]:
    """Return text and answer with the strongest normalisation that keeps the answer non-empty."""
    forms = (normalise, lambda text: " ".join(_without_punctuation(text.casefold()).split()))
    for form in forms:
        if expected := form(answer):
            return form(text), expected
    return text.strip().casefold(), answer.strip().casefold()


def _f1(text: str, answer: str) -> float:
    words, expected = (each.split() for each in _comparable(text, answer))
    if not words or not expected:
        return float(words == expected)
    return 2 * (Counter(words) & Counter(expected)).total() / (len(words) + len(expected))


def _last_number(text: str) -> Decimal | None:
    *_, last = [None, *NUMBER.finditer(text)]
    if last is None:
        return None
    plain = last[0].translate(_TO_DECIMAL).partition("/")[0]
    return Decimal(plain) / Decimal(last["denominator"] or 1)
