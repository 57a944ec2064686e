"""Any command plays an episode through a chat endpoint whose model is the policy."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from envs.agent import Agent, succeeded, wrote
from envs.datasets import JsonLines
from envs.episode import Example, StopReason
from envs.messages import tool_call, user
from envs.policy_endpoint import SESSION, PolicyEndpoint
from envs.protocol import ContextFull, PolicyTurn
from rl.sampling.player import Player
from tests.support.scripted import SAMPLER, ScriptedClient, chat_of

ASK = """
import json, os, sys
from urllib.request import Request, urlopen
from urllib.error import HTTPError
def ask(text, key=None, **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        answer = json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))
    except HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    return answer["choices"][0]["message"]["content"]
"""


def agent(command, tmp_path, *, max_requests=9, variables=None) -> Agent:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"q": f"task {i}", "a": "yes"}) + "\n" for i in range(3)))
    dataset = JsonLines(path=str(tasks), eval_path=None, prompt="q", answer="a", num_eval=1)

    async def output(episode):
        seen.append(dict(episode.memory))
        return 0.0

    seen = []
    given = {"tools": (), "max_turns": 1, "tool_timeout": 9.0, "describe_tools": True}
    given |= {"shared": {}, "per_episode": {}, "bindings": {}, "toolsets": {}}
    given["rewards"] = {"wrote": lambda episode: wrote(episode, path="answer.txt")}
    given["rewards"] |= {"succeeded": succeeded, "output": output}
    weights = {"wrote": 1.0, "succeeded": 0.0}
    env = Agent(name="agent", dataset=dataset, max_concurrent=None, reward_weights=weights, **given)
    env.configure(command=command, variables=variables or {}, max_requests=max_requests)
    env.seen = seen
    return env


def python(code: str) -> list[str]:
    return [sys.executable, "-c", ASK + code, "{prompt}"]


def play(env, *answers, group_size=1, timeout=60.0):
    sampler = replace(SAMPLER, rollout_timeout=timeout)
    opening = [{"role": "system", "content": "brief"}, user("say yes")]
    example = Example(0, "agent", opening, {"answer": "Yes"})
    player = Player(sampler, env, chat_of(ScriptedClient(*answers), sampler))
    return asyncio.run(player.play_group(0, example, group_size))


def test_a_shell_agent_is_scored_by_its_file_and_every_token_is_in_its_row(tmp_path):
    env = agent([sys.executable, "examples/my-lab/my_lab/shell_agent.py", "{prompt}"], tmp_path)
    (rollout,) = play(env, "echo yes > answer.txt; echo 1", "done")
    assert (rollout.error, rollout.rewards) == ("", {"wrote": 1.0, "succeeded": 1.0, "output": 0.0})
    assert (rollout.reward, rollout.turns, rollout.stop_reason) == (1.0, 2, StopReason.STOP)
    (row,) = rollout.rows
    chosen = row.token_ids[row.completion_mask]
    assert bytes(t for t in chosen if t < 256) == b"echo yes > answer.txt; echo 1done"
    assert set(row.token_versions[row.completion_mask]) == {7}
    contents = [m["content"] for m in rollout.messages]
    assert contents == ["say yes", "echo yes > answer.txt; echo 1", "1\n", "done"]
    assert not env.seen[0]["folder"].exists()


def test_agents_have_their_own_keys_and_variables_no_secret_of_the_run_and_their_output_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = "print('x' * 70_000, sorted(os.environ), ask('a', 'other'), ask('b', n=2), ask('c'),"
    code += "os.environ['X'], os.environ['OPENAI_API_KEY'], flush=True); sys.exit(3)"
    env = agent(python(code), tmp_path, variables={"X": "own", "OPENAI_API_KEY": "not ours"})
    rollouts = play(env, "hello", group_size=3)
    assert [(one.turns, one.rewards["succeeded"]) for one in rollouts] == [(1, 0.0)] * 3
    outputs = [seen["output"] for seen in env.seen]
    assert len({output.split()[-1] for output in outputs}) == 3
    for output in outputs:
        assert len(output) == 2**16  # the end of it
        assert "has another key than OPENAI_API_KEY" in output
        assert "n=2: the policy returns one answer" in output
        assert "hello own" in output
        assert "WANDB_API_KEY" not in output


def alive(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]


@pytest.mark.parametrize(
    ("then", "timeout", "reason", "succeeded", "error"),
    [
        ("; import time; time.sleep(99)", 3.0, "timeout", None, "sampler.rollout_timeout=3 s"),
        ("", 60.0, "stop", 1.0, ""),
    ],
    ids=["hangs", "ends"],
)
def test_all_processes_of_an_agent_end_with_it(then, timeout, reason, succeeded, error, tmp_path):
    mark = f"mark-{os.getpid()}"
    leave = f"['sh', '-c', 'sleep 99; : {mark}'], start_new_session=True); ask('x'){then}"
    env = agent(python(f"import subprocess; subprocess.Popen({leave}"), tmp_path)
    (rollout,) = play(env, "hello", timeout=timeout)
    assert (rollout.stop_reason, rollout.rewards.get("succeeded")) == (reason, succeeded)
    assert (rollout.reward is None, rollout.turns) == (succeeded is None, 1)
    assert error in rollout.error
    assert alive(mark) == []


def test_an_agent_that_asks_too_often_is_scored_and_one_without_the_task_is_refused(tmp_path):
    endless = "open('answer.txt', 'w').write('yes')\nwhile True: ask('again')"
    (rollout,) = play(agent(python(endless), tmp_path, max_requests=2), "hello")
    assert (rollout.turns, rollout.stop_reason) == (2, StopReason.MAX_TURNS)
    assert (rollout.reward, rollout.rewards["succeeded"]) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"command=\['sh'\] has no {prompt}"):
        agent(["sh"], tmp_path)


CALL, TEXT = tool_call("add", a=1), {"type": "text"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
PARTS = [TEXT | {"text": "be"}, TEXT | {"text": "!"}]
BODY = {"model": "m", "n": 1, "messages": [{"role": "system", "content": PARTS}, user("hi")]}


async def ask(body, message=CALL, cut_off=False):
    """Return status, answer, and the arguments of `speak`."""
    heard = []

    async def speak(messages, tools):
        heard.append((messages, tools))
        if isinstance(message, Exception):
            raise message
        return PolicyTurn(message, cut_off, 3, 4)

    async with PolicyEndpoint({"one": speak}).serving() as url, aiohttp.ClientSession() as http:
        headers = {SESSION: "one"}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.text(), heard


async def test_a_turn_comes_back_with_its_calls_as_json_text_also_as_a_stream():
    status, text, ((messages, tools),) = await ask(BODY | {"tools": [TOOL]})
    answer = json.loads(text)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (status, choice["finish_reason"]) == (200, "tool_calls")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert [m["content"] for m in messages] == ["be!", "hi"]
    assert tools == [{"name": "add", "parameters": {}}]
    _, text, ((_, tools),) = await ask(BODY | {"stream": True, "tools": []}, cut_off=True)
    first, second, *rest = text.split("\n\n")
    said, ended = (json.loads(line.removeprefix("data: ")) for line in (first, second))
    assert (rest, tools) == (["data: [DONE]", ""], None)
    assert said["choices"][0]["delta"]["tool_calls"] == [call | {"index": 0}]
    assert ended["choices"][0]["finish_reason"] == "length"
    assert said["id"] == ended["id"]


async def test_invalid_requests_are_refused():
    for change, message, said in (
        ({}, ContextFull("full"), "context_length_exceeded"),
        ({"messages": [user([{"type": "image_url"}])]}, CALL, "reads only text, not ['image_url']"),
        ({"messages": "hi"}, CALL, "invalid_request"),
    ):
        status, text, _ = await ask(BODY | change, message)
        assert (status, said in text) == (400, True)
