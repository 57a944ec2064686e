"""No completion of the policy ends a run or is reported as an error of the environment."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from envs.episode import Episode, Example, StopReason
from envs.maths.grading import final_answer, marked_answer, normalise, number
from envs.protocol import Environment
from envs.rewards import contains, exact_match, matches, number_match, token_f1
from envs.tools import ToolError
from lab.viewer.export import write_page
from lab.viewer.index import RunIndex
from rl.evaluation.play import write_rollouts
from rl.evaluation.summary import PlayedExample
from rl.records import Credit, Group, Rollout
from rl.rollouts.service import train_line
from rl.runtime.folder import RunFolder
from rl.sampling.player import Player
from tests.support.fuzz import FuzzedClient, large_texts, texts, tokens
from tests.support.scripted import HI, SAMPLER, chat_of
from tests.support.virtual_time import run_virtually

LONG = replace(SAMPLER, max_tokens=10**6)
EXAMPLE = Example(0, "fuzzed", list(HI), {"answer": "12", "reversed": "olleh"})


async def look(word: str) -> str:
    """Look a word up.

    Args:
        word: which one.
    """
    return f"{word} is a word: {chr(0xD800)}" if "漢" in word else word


async def count(times: int, parts: list[float] | None = None, *, episode: Episode) -> dict:
    """Count."""
    if times > 10**6:
        raise ToolError(f"{times} is too many")
    return {"times": times, "share": float(times), "parts": parts, "before": episode.tool_calls}


class Fuzzed(Environment):
    """Two tools, and every way to read an answer that ships."""

    name = "fuzzed"
    tools = (look, count)
    max_turns = 2
    describe_tools = False  # short prompts: the fuzz takes seconds
    reward_weights = {"exact": 1.0}  # noqa: RUF012 as environments write it

    async def score(self, episode):
        answer = normalise((final_answer(episode.text) or "")[:500])
        value = number(answer)
        return {
            "exact": await exact_match(episode),
            "f1": await token_f1(episode),
            "contains": await contains(episode),
            "number": await number_match(episode, tolerance=0.1),
            "form": await matches(episode, pattern=r"\s*<b>.*</b>\s*"),
            "marked": float(marked_answer(episode.text) is not None),
            "value": float(value == 12) if value is not None else 0.0,
        }


def played(completions: list[list[int]]) -> tuple[Rollout, ...]:
    """As many rollouts as it takes to say each of them."""
    client, rollouts = FuzzedClient(completions), ()
    player = Player(LONG, Fuzzed(), chat_of(client, LONG, 10**7))
    while client.given < len(completions):
        rollouts += run_virtually(player.play_group(0, EXAMPLE, min(len(completions), 500)))
    return rollouts


def assert_written(rollouts: tuple[Rollout, ...], folder: Path) -> None:
    """All are scored, and files and pages hold them as JSON and UTF-8 that any program reads."""
    assert {(rollout.error, rollout.reward is None) for rollout in rollouts} == {("", False)}
    assert StopReason.ENV_ERROR not in {rollout.stop_reason for rollout in rollouts}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    credit = Credit(0.0, (0.0,))
    group = Group(0, EXAMPLE, 0, rollouts, (credit,) * len(rollouts))
    for rollout in rollouts:
        line = train_line(group, rollout, credit, used=True)
        json.loads(json.dumps(line), parse_constant=refuse)
        json.dumps(line, ensure_ascii=False).encode()
    examples = range(0, len(rollouts), 100)
    played = [PlayedExample(replace(EXAMPLE, id=i), rollouts[i : i + 100]) for i in examples]
    write_rollouts(folder / "rollouts.jsonl", played)
    index = RunIndex(RunFolder(folder))
    index.refresh()
    assert (len(index.rows), [*index.broken.values()]) == (len(rollouts), [[]])
    write_page(RunFolder(folder), folder / "page.html", "fuzz")


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_odd_completions_are_scored_without_an_error(count, tmp_path):
    rng = Random("fuzz")
    completions = [tokens(text, rng) for text in islice(texts(rng), count)]
    rollouts = played(completions)
    assert_written(rollouts, tmp_path)
    assert sum(rollout.tool_calls for rollout in rollouts) > count / 4  # the tools were reached
    assert 0 < sum(r.tool_errors for r in rollouts) < sum(r.tool_calls for r in rollouts)


def test_large_completions_are_scored_without_an_error(tmp_path):
    rng = Random("large")
    rollouts = played([tokens(text, rng) for text in large_texts()])
    assert_written(rollouts, tmp_path)
