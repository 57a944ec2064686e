"""The page and the table of an evaluation, read back."""

from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from envs.episode import Example, StopReason
from envs.messages import assistant, tool_call, user
from rl.evaluation.page import page
from rl.evaluation.summary import Played, summarise
from rl.evaluation.table import Progress, report
from rl.records import Rollout

EVIL = '<script>alert("x")</script><img src="http://elsewhere/x.png">'


class Reader(HTMLParser):
    """Collects tags, what they refer to, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.links, self.text, self.open = [], [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def rollout(reward: float | None, *messages, **known) -> Rollout:
    facts = {"messages": [user("go"), *messages], "rewards": {}, "turns": 1}
    facts |= {"sequences": (), "stop_reason": StopReason.STOP, "generation_time": 0.0}
    return Rollout(**{**facts, "reward": reward, **known})


def played(*rollouts: Rollout, env: str = "mine") -> Played:
    return Played(Example(id=4, env=env, messages=[]), rollouts)


def read(*examples: Played) -> Reader:
    reader = Reader()
    text = page("my run", examples, summarise(examples, 1.0), {"model": "my/model <b>"})
    reader.feed(text.encode("utf-8").decode("utf-8"))
    assert reader.open == []
    return reader


def test_what_the_policy_says_is_text_and_nothing_else():
    tool = {"role": "tool", "tool_call_id": "c", "content": EVIL}
    call = tool_call("search", query=EVIL)
    call["tool_calls"][0]["error"] = EVIL
    thinking = {**assistant(EVIL), "reasoning_content": EVIL}
    reader = read(played(rollout(1.0, call, tool, thinking, error=EVIL), env=EVIL))
    assert not {"script", "img"} & set(reader.tags)
    assert reader.links == []  # nothing is loaded from anywhere
    assert reader.text.count("alert") == 7


def test_the_worst_the_median_and_the_best_are_shown_and_what_could_not_be_scored():
    some = [played(rollout(i / 10, assistant(f"answer {i}"))) for i in range(11)]
    failed = played(rollout(None, error="it broke", stop_reason=StopReason.ENV_ERROR))
    text = read(*some, failed).text
    kinds = [text.index(kind) for kind in ("worst", "median", "best", "not scored")]
    assert kinds == sorted(kinds)
    shown = [i for i in range(11) if f"answer {i}" in text.replace("answer 10", "answer ten")]
    assert shown == [0, 1, 2, 4, 5, 6, 8, 9]
    assert text.index("answer 10") < text.index("answer 9")  # the best first
    assert "it broke" in text
    assert "stopped: env_error" in text


def test_a_call_and_its_answer_are_shown_with_the_reward_and_the_stop_reason():
    tool = {"role": "tool", "tool_call_id": "call_0", "content": "cats purr"}
    text = read(
        played(rollout(0.25, tool_call("search", query="cat"), tool, assistant("purring")))
    ).text
    for part in ('search({"query": "cat"})', "cats purr", "reward 0.250", "stopped: stop"):
        assert part in text


ODD_CALLS = [
    ["a string"],
    [None, 7, {}],
    [{"function": None}],
    [{"function": {"name": ["x"], "arguments": {1: {2, 3}}}}],
    [{"function": {"name": "f", "arguments": "\ud800"}, "error": "\ud800"}],
    {"function": {"name": "f"}},
    "calls",
    7,
]


@pytest.mark.parametrize("calls", ODD_CALLS, ids=str)
def test_calls_of_any_shape_are_shown_and_end_nothing(calls):
    assert "reward 0.500" in read(played(rollout(0.5, assistant("x") | {"tool_calls": calls}))).text


@pytest.mark.parametrize(
    "message",
    [
        assistant("half a \ud83d pair"),
        {"role": ["\ud800"], "content": {"a": float("nan"), "b": {1, 2}}},
        {"role": "tool", "content": b"\xff", "reasoning_content": {"\ud800": 1}},
        {"content": [{"type": "text", "text": "\ud800"}]},
        "no message at all",
        None,
    ],
    ids=str,
)
def test_a_message_of_any_shape_is_shown_and_ends_nothing(message):
    odd = played(rollout(0.5, message, error="\ud800"), env="\ud800")
    assert "reward 0.500" in read(odd).text
    assert "1 x " in table(odd)


def test_nothing_may_be_loaded_or_run_even_where_something_was_not_escaped():
    text = page("x", [played(rollout(1.0))], summarise([played(rollout(1.0))], 1.0), {})
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in text
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_the_page_says_what_was_evaluated_how_and_what_would_have_been_right():
    example = Example(id=4, env="mine", messages=[], info={"answer": "<42>", "level": 3})
    one = Played(example, (rollout(0.0, assistant("41")),))
    reader = Reader()
    facts = {"model": "outputs/a/hf", "command": "python evaluate.py env=mine"}
    reader.feed(page("my run", [one], summarise([one], 1.0), facts))
    for text in (*facts, *facts.values(), "right answer: <42>"):
        assert text in reader.text
    assert "level" not in reader.text


def test_an_example_without_an_answer_shows_all_that_it_knows():
    example = Example(id=4, env="mine", messages=[], info={"names": ["a", "b"]})
    one = Played(example, (rollout(0.0),))
    reader = Reader()
    reader.feed(page("my run", [one], summarise([one], 1.0), {}))
    assert 'known of the example: {"names": ["a", "b"]}' in reader.text


def test_the_worst_are_of_different_examples():
    def example(number: int, *rewards: float) -> Played:
        rollouts = [rollout(r, assistant(f"example {number}")) for r in rewards]
        return Played(Example(id=number, env="mine", messages=[]), tuple(rollouts))

    hard, rest = example(0, *[0.0] * 8), [example(i, 0.25, 0.5, 1.0) for i in range(1, 5)]
    text = read(hard, *rest).text
    worst = text[text.index("worst") : text.index("median")]
    assert [worst.count(f"example {i}\xa0") + worst.count(f"example {i} ·") for i in range(5)] == [
        *(1, 1, 1),
        *(0, 0),
    ]


def table(*examples: Played) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(report(summarise(examples, 1.0), 1.0, "outputs/x"))
    return console.file.getvalue()


def test_the_table_has_the_numbers_and_what_they_mean():
    lines = table(played(rollout(0.0), rollout(0.0)), played(rollout(0.0), rollout(0.0)))
    assert "pass@2" in lines
    assert "0.000 ± 0.000" in lines
    assert "! pass@1 is 0 %: too hard" in lines


def test_a_mixture_has_a_column_each_and_nothing_is_called_nan():
    lines = table(played(rollout(1.0), env="a"), played(rollout(None, error="broke"), env="b"))
    head = next(line for line in lines.splitlines() if line.strip())
    assert head.split() == ["all", "a", "b"]
    assert "nan" not in lines
    assert "1 x broke" in lines


@pytest.mark.parametrize("size", [1, 7, 40])
def test_progress_is_ten_lines_at_most_where_there_is_no_terminal(size):
    console = Console(file=StringIO(), width=100)
    with Progress(console, size, 2) as progress:
        for _ in range(size):
            progress.add(played(rollout(1.0), rollout(0.0)))
    lines = console.file.getvalue().strip().splitlines()
    assert 1 <= len(lines) <= 10
    assert lines[-1] == f"{2 * size} of {2 * size} rollouts, mean reward 0.500"


def test_names_that_look_like_markup_are_shown_as_they_are():
    odd = rollout(1.0, error="[/red] broke")
    named = {"[bold]mine": 1.0, "[/]": 0.5}
    lines = table(
        played(replace(odd, rewards=named), env="[/env]"), played(rollout(0.0), env="[red]b")
    )
    for name in ("[/env]", "[red]b", "[bold]mine", "[/]", "[/red] broke"):
        assert name in lines
