"""This project's environments evaluated by the library over HTTP, by either generation."""

import asyncio
import json
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from envs.alphabet_sort import AlphabetSort
from envs.messages import assistant, tool_call
from envs.policy_endpoint import completion
from envs.protocol import PolicyTurn
from tests.support.answers import Answers

CLASSIC = find_spec("verifiers.envs") is not None


class ScriptedEndpoint(Answers):
    """Answer every request with the result of `speak`, which a token limit ended if `cut_off`."""

    def __init__(self, speak, *, cut_off=False):
        super().__init__()
        self._speak, self._cut_off = speak, cut_off

    def answer(self, path, body, number):
        return 200, completion(PolicyTurn(self._speak(body["messages"]), self._cut_off, 10, 5))


def reverse_half(messages):
    """Answer `reverse: ...`, correctly except for words that begin with a to m."""
    word = messages[-1]["content"].removeprefix("reverse: ")
    return assistant(word[::-1] if word > "n" else word)


def sort_the_first(messages):
    """Answer `sort: ...` correctly in every turn."""
    names = next(m["content"] for m in messages if m["role"] == "user").removeprefix("sort: ")
    return assistant(" ".join(sorted(names.split())))


def use_the_adder(messages):
    """Call `add` first, then repeat its answer."""
    if messages[-1]["role"] == "tool":
        return assistant(messages[-1]["content"])
    return tool_call("add", "call_1", a=2, b=3)


@dataclass
class Result:
    """What the library reports of one rollout."""

    question: str
    rewards: dict[str, float]
    turns: int
    error: str


def classic(endpoint, env, repeats, options):
    import verifiers as vf
    from verifiers.types import ClientConfig

    limit = options.pop("max_tokens_of_a_rollout", -1)
    made = vf.load_environment("offbyone", env=env, **options)
    made.set_max_total_completion_tokens(limit)
    client = ClientConfig(api_base_url=endpoint.url, api_key_var="NO_KEY", max_retries=0)
    done = made.evaluate(client, "scripted", num_examples=-1, rollouts_per_example=repeats)
    results = []
    for o in asyncio.run(done)["outputs"]:
        turns = sum(message["role"] == "assistant" for message in o["completion"])
        question, error = o["prompt"][-1]["content"], str(o["error"] or "")
        results.append(Result(question, o["metrics"] or {}, turns, error))
    return results


def tasksets(folder, endpoint, env, repeats, options):
    from verifiers.v1.cli.eval.main import main

    limits = {"max_output_tokens": options.pop("max_tokens_of_a_rollout", None)}
    config = {
        "env": {"taskset": {"id": "offbyone", "env": env, "options": options}, "agent": limits},
        "client": {"base_url": endpoint.url, "api_key_var": "NO_KEY"},
        "output_dir": str(folder),
        "run": {"name": "run"},
        **{"model": "scripted", "num_rollouts": repeats, "push": False, "rich": None},
    }
    (folder / "eval.json").write_text(json.dumps(config))
    main(["@", str(folder / "eval.json")])
    results = []
    for line in (folder / "run" / "traces.jsonl").read_text().splitlines():
        episode = json.loads(line)
        (trace,) = episode["traces"]
        rewards = {name: r["score"] for name, r in trace["rewards"].items() if r}
        turns = sum(node["sampled"] for node in trace["nodes"])
        question = trace["task"]["data"]["prompt"][-1]["content"]
        error = "" if episode["ok"] else line
        results.append(Result(question, trace["metrics"] | rewards, turns, error))
    return results


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Return a function that evaluates an environment and returns the result of each rollout."""
    monkeypatch.setenv("NO_KEY", "none")
    monkeypatch.setattr("sys.argv", ["vf-eval"])

    def run(endpoint, env, repeats=1, **options):
        if CLASSIC:
            return classic(endpoint, env, repeats, options)
        return tasksets(tmp_path, endpoint, env, repeats, options)

    return run


def test_reverse_text_is_evaluated_by_the_library(evaluate):
    with ScriptedEndpoint(reverse_half).listening() as endpoint:
        options = {"num_eval": 20, "max_length": 4, "system_prompt": "Backwards, please."}
        results = evaluate(endpoint, "reverse-text", 2, **options)
    assert endpoint.bodies[0]["messages"][0]["content"] == "Backwards, please."
    assert len(results) == len(endpoint.bodies) == 40
    for result in results:
        word = result.question.removeprefix("reverse: ")
        assert 3 <= len(word) <= 4
        assert result.error == ""
        assert result.rewards["exact"] == (word > "n" or word == word[::-1])
    assert {result.rewards["exact"] for result in results} == {0.0, 1.0}


def test_a_rollout_that_a_limit_of_the_library_ended_is_scored(evaluate, monkeypatch):
    closed = []
    monkeypatch.setattr(AlphabetSort, "close", lambda _, episode: closed.append(episode))
    options = {"num_eval": 1, "min_turns": 2, "max_turns": 2, "max_tokens_of_a_rollout": 5}
    with ScriptedEndpoint(sort_the_first).listening() as endpoint:  # 5 tokens a turn
        (result,) = evaluate(endpoint, "alphabet-sort", **options)
    assert (result.rewards["exact"], result.turns, result.error) == (0.5, 1, "")
    assert [episode.stop_reason for episode in closed] == ["context"]


@pytest.mark.parametrize(
    ("max_turns", "cut_off", "turns", "reason"),
    [(3, False, 2, "stop"), (1, False, 1, "max_turns"), (3, True, 1, "max_tokens")],
)
def test_tools_are_described_called_and_counted_and_the_episode_is_closed(
    max_turns, cut_off, turns, reason, evaluate, monkeypatch
):
    from adding import Adding

    closed = []
    monkeypatch.setattr(Adding, "max_turns", max_turns)
    monkeypatch.setattr(Adding, "close", lambda _, episode: closed.append(episode.stop_reason))
    with ScriptedEndpoint(use_the_adder, cut_off=cut_off).listening() as endpoint:
        (result,) = evaluate(endpoint, "adding.Adding", reward=None)
    assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "add"
    assert (result.rewards["right"], result.rewards["turns"]) == (float(turns == 2), 2.5)
    assert (result.turns, result.error, closed) == (turns, "", [reason])


@pytest.mark.parametrize(
    ("reward", "why"),
    [("raise", "no score"), ("raise in reply", "no reply"), ("nan", "NaN or infinity")],
)
def test_a_rollout_that_cannot_be_scored_ends_in_an_error(evaluate, reward, why):
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        (result,) = evaluate(endpoint, "adding.Adding", reward=reward)
    assert why in result.error
