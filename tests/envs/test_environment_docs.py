"""Every Python snippet of docs/environments.md runs as it stands, imports and all."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from envs.episode import Episode, Example, StopReason
from envs.protocol import Environment, Pool
from rl.records import Group, Rollout
from tests.support import printed

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def modules(monkeypatch):
    made = {}
    for path, source in printed.files(PAGE).items():
        if path.endswith(".yaml"):
            continue
        name = path.removesuffix(".py").replace("/", ".")
        made[name] = module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, path, "exec"), module.__dict__)
    return made


async def test_the_environments_of_the_documentation_play(modules):
    assert set(modules) == {*("my_env", "my_pages", "my_shorter", "my_package", "my_order")}
    shout = modules["my_shorter"].Shorter(num_train=2, reward_weights={"exact": 1.0})
    pages = modules["my_pages"].Pages()
    for env in (shout, pages):
        assert isinstance(env, Environment)
        example = env.examples("train")[0]
        answer = {"role": "assistant", "content": example.info["answer"]}
        scored = await env.score(Episode(example, [*example.messages, answer]))
        assert set(env.reward_weights) <= set(scored)
        assert max(scored.values()) == 1.0
    held = Episode(pages.examples("train")[0], [])
    call = {"id": "c", "function": {"name": "read", "arguments": {"title": "Rome"}}}
    assert (await pages.toolbox.answer(call, held))["content"] == "The capital of Italy."
    assert len(pages.tool_specs) == 2


async def test_the_functions_of_the_composed_environment_run(modules, tmp_path):
    parts = modules["my_package"]
    (tmp_path / "index.json").write_text('{"Paris": "The capital of France."}')
    index = parts.load_index(path=str(tmp_path / "index.json"))
    assert parts.search("par", index, limit=1) == "Paris"
    episode = Episode(None, [{"role": "assistant", "content": "Paris"}])
    assert await parts.cited(episode, index, bonus=0.5) == 0.5


def test_the_order_of_the_documentation_repeats_failed_examples(modules):
    def begun(state):
        order = modules["my_order"].Retry()
        order.begin([Pool(1.0, [Example(i, "e", []) for i in range(5)])], 0)
        order.load(json.loads(json.dumps(state)))
        return order

    order = begun({})
    first = order.next(0)
    lost = Rollout((), [], 0.0, {}, StopReason.STOP, 1, 0.0)
    order.observe(first, Group(0, order.example(first), 0, (lost,), ()))
    resumed = begun(order.state())
    assert [resumed.next(1), resumed.next(2)] == [first, order.next(2)]
    assert resumed.state()["failed"] == []
