"""Either generation of the library: its environments here, and ours evaluated by it over HTTP."""

import asyncio
import json
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from envs.alphabet_sort import AlphabetSort
from envs.episode import StopReason
from envs.messages import assistant, tool_call
from envs.policy_endpoint import completion
from envs.protocol import PolicyTurn
from envs.verifiers.environment import Verifiers
from rl.sampling.player import Player
from tests.support.answers import Answers
from tests.support.scripted import SAMPLER, ScriptedClient, chat_of, tiny_tokenizer

CLASSIC = find_spec("verifiers.envs") is not None
GAME = "letter-game" if CLASSIC else "letter-tasks"
SIZE = {"own_eval": False, "size": 10} if CLASSIC else {"taskset": {"size": 10}}
COUNTED = {"asked": 1.0, "num_turns": 2.0} if CLASSIC else {"turns": 2.0}
classic_only = pytest.mark.skipif(not CLASSIC, reason="of the classic API")
v1_only = pytest.mark.skipif(CLASSIC, reason="of verifiers.v1")


# The end of the second prompt of a letter game after the first turn aaBB.
TWO_TURNS = (
    "<|im_start|>assistant\naaBB<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TOKENIZER = tiny_tokenizer()


def bridge(env_id, **changes):
    """An environment of the library, with all its examples."""
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": None}
    return Verifiers(id=env_id, **{**options, **changes})


def play(env, *answers, max_seq_len=1024, max_tokens=SAMPLER.max_tokens):
    """Return the rollouts of the first training example, and the engine."""
    client, sampler = ScriptedClient(*answers), replace(SAMPLER, max_tokens=max_tokens)
    player = Player(sampler, env, chat_of(client, sampler, max_seq_len))
    return asyncio.run(player.play_group(0, env.examples("train")[0], 1)), client


def said(rollout):
    """The tokens that the policy chose, all in one row, special ones left out."""
    (row,) = rollout.rows
    return TOKENIZER.decode(row.token_ids[row.completion_mask].tolist(), skip_special_tokens=True)


def letters(examples):
    return "".join(example.messages[1]["content"][-1] for example in examples)


def test_the_eval_split_is_that_of_the_library_or_the_last_examples():
    if CLASSIC:
        env = bridge(GAME, num_eval=3, num_train=5)
        assert (letters(env.examples("train")), letters(env.examples("eval"))) == ("abcab", "xyz")
    env = bridge(f"owner/{GAME}", args=SIZE, num_eval=4)
    train = env.examples("train")
    assert (letters(train), letters(env.examples("eval"))) == ("abcabc", "abca")
    assert train[0].messages[0] == {"role": "system", "content": "be brief"}
    assert (train[4].id, train[0].env) == (4, GAME)
    # Each episode of verifiers.v1 is a process.
    assert env.max_concurrent == (None if CLASSIC else 4 * len(os.sched_getaffinity(0)))


def test_an_episode_of_two_turns_is_one_row_and_scored_as_the_library_scores_it():
    env = bridge(GAME)
    (rollout,), client = play(env, "aaBB", "aa")
    assert rollout.error == ""
    assert TOKENIZER.decode(client.requests[1][0]).endswith(TWO_TURNS)
    assert rollout.rewards == {"letters": 4 / 6, "lower": 4 / 6, **COUNTED, "unlisted": 0.0}
    assert rollout.reward == pytest.approx(4 / 6 + 0.5 * 4 / 6)
    assert env.reward_weights == {"letters": 1.0, "lower": 0.5, "unlisted": 1.0}
    stop_reason = StopReason.MAX_TURNS if CLASSIC else StopReason.STOP
    assert (rollout.stop_reason, rollout.turns) == (stop_reason, 2)
    (row,) = rollout.rows
    assert said(rollout) == "aaBBaa"
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_a_cut_off_turn_a_full_context_and_a_limit_of_turns_are_the_stop_reasons():
    (rollout,), _ = play(bridge(GAME), "a" * 100)  # the library continues
    assert (rollout.stop_reason, rollout.turns) == (StopReason.MAX_TOKENS, 2)
    (rollout,), _ = play(bridge(GAME), "a" * 30, max_seq_len=100)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.CONTEXT, 1)
    # The harness of verifiers.v1 fails, and its library does not score the episode.
    assert (rollout.reward, rollout.error) == (1.5 if CLASSIC else 0.0, "")
    if not CLASSIC:
        (rollout,), _ = play(bridge(GAME, args={"agent": {"max_turns": 1}}), "aa")
        found = (rollout.stop_reason, rollout.turns, rollout.reward)
        assert found == (StopReason.MAX_TURNS, 1, 1.5)


def test_an_exception_of_its_code_costs_the_rollout():
    env = bridge(GAME, args={"fail": True} if CLASSIC else None)
    (rollout,), _ = play(env, "break")
    assert rollout.stop_reason is StopReason.ENV_ERROR
    assert ("the game is broken" if CLASSIC else "the judge is broken") in rollout.error


@classic_only
def test_tools_are_in_the_prompt_and_answered_by_the_library():
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "%s"}}\n</tool_call>'
    texts = (call % "bob", call % "ann", "q")
    answers = [TOKENIZER.encode(f"{text}<|im_end|>") for text in texts]
    (rollout,), client = play(bridge("letter-tools"), *answers, max_seq_len=4096, max_tokens=200)
    first, second, third = (TOKENIZER.decode(ids) for ids, *_ in client.requests)
    assert '"look_up"' in first
    assert "whose letter" in first
    assert "<tool_response>\n'bob'\n</tool_response>" in second
    assert "<tool_response>\nq\n</tool_response>" in third
    assert (rollout.reward, rollout.error, rollout.tool_calls) == (1.0, "", 2)
    assert len(rollout.rows) == 1


@classic_only
def test_rewards_that_compare_a_group_are_refused():
    with pytest.raises(ValueError, match="compare the rollouts of a group"):
        bridge(GAME, args={"grouped": True}).examples("train")


@v1_only
def test_each_run_of_an_agent_is_a_role_with_its_own_reward():
    rollouts, _ = play(bridge("letter-race"), "a", "bb", "aaa", "a", max_tokens=4)
    roles = [("writer", "a"), ("rival", "bb"), ("writer-2", "aaa"), ("judge", "a")]
    assert [(r.role, said(r)) for r in rollouts] == roles
    assert [r.rewards["longest"] for r in rollouts[:3]] == [0.0, 0.0, 1.0]
    # letters + lower / 2 + longest
    assert [r.reward for r in rollouts] == [1.5, 0.5, 2.5, None]
    assert rollouts[3].error == ""  # the environment does not train the judge


@v1_only
def test_an_endless_taskset_needs_num_train():
    assert len(bridge("plain-tasks", num_train=3, num_eval=2).examples("train")) == 3
    with pytest.raises(ValueError, match=r"has no end: set env\.num_train to"):
        bridge("plain-tasks").examples("train")


@v1_only
def test_the_harness_has_no_shell_and_none_of_our_paths_unless_the_configuration_asks_for_them():
    from envs.verifiers.v1 import env_config

    agent = env_config("plain_tasks", {}).agent
    assert (agent.harness.id, agent.runtime.type) == ("null", "subprocess")
    # The harness null is a script with packages of its own.
    assert agent.harness.env == {"PYTHONPATH": ""}
    args = {"writer": {"harness": {"env": {"PYTHONPATH": "mine", "A": "b"}}}}
    race = env_config("letter_race", args)
    assert race.writer.harness.env == {"PYTHONPATH": "mine", "A": "b"}
    assert race.rival.harness.env == {"PYTHONPATH": "", "C": "d"}  # what it declares remains


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
