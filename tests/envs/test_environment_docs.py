"""Every Python snippet of docs/environments.md runs as it stands, imports and all."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from envs.episode import Episode
from envs.protocol import Environment
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
    assert set(modules) == {"my_env", "my_pages", "my_package"}
    shout = modules["my_env"].Shout(num_train=2, reward_weights={"exact": 1.0})
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
    assert len(pages.tool_specs) == 1


async def test_the_functions_of_the_composed_environment_run(modules, tmp_path):
    parts = modules["my_package"]
    (tmp_path / "index.json").write_text('{"Paris": "The capital of France."}')
    index = parts.load_index(path=str(tmp_path / "index.json"))
    assert parts.search("par", index, limit=1) == "Paris"
    episode = Episode(None, [{"role": "assistant", "content": "Paris"}])
    assert await parts.cited(episode, index, bonus=0.5) == 0.5
