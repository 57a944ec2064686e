"""Check that the documentation covers every choice, its links resolve and its environments run."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.page import page, programs
from envs.episode import Episode
from envs.messages import assistant, tool_call_entry
from envs.protocol import Environment
from tests.support import printed

REPO = Path(__file__).parents[1]
CONF, DOCS = REPO / "conf", REPO / "docs"
README = REPO / "README.md"
LOSSES = (DOCS / "losses.md").read_text()
NOT_FORMULAS = {"__init__", "tokens"}  # files of losses/
DESCRIBED = ("loss", "advantage", "aggregation", "kl", "correction", "truncation", "batch_credit")


def section(group: str) -> str:
    """Return the section of losses.md about a group."""
    if group == "loss":
        return LOSSES.split("## Algorithms\n")[1].split("\n## ")[0]
    return next(part for part in LOSSES.split("\n## ") if f"(conf/{group}" in part.split("\n")[0])


@pytest.mark.parametrize("group", DESCRIBED)
def test_every_choice_is_described_in_the_section_of_its_group(group: str) -> None:
    for name in (path.stem for path in (CONF / group).glob("*.yaml")):
        assert re.search(rf"(?<![\w.]){name}(?!\w)", section(group)), f"losses.md omits {name}"


def test_every_formula_and_every_algorithm_is_named_in_the_table_and_below_it() -> None:
    formulas = {path.stem for path in (REPO / "losses").glob("*.py")} - NOT_FORMULAS
    assert [name for name in formulas if f"losses/{name}.py" not in LOSSES] == []
    rows = re.findall(r"^\| (\w+)(?: \(default\))? \| losses/", LOSSES, re.MULTILINE)
    headings = re.findall(r"^### (.+)$", section("loss"), re.MULTILINE)
    assert sorted(rows) == sorted(name for line in headings for name in line.split(", "))
    assert {path.stem for path in (CONF / "loss").glob("*.yaml")} <= set(rows)


def test_the_readme_names_every_group_once() -> None:
    section = README.read_text().split("## Groups and choices\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE)
    named = [name for row in rows for name in row.split(", ")]
    assert sorted(named[1:]) == sorted(path.name for path in CONF.glob("*/"))


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_every_link_and_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    folders = "rl|lab|losses|envs|conf|tests|docs|models|examples"
    named = re.findall(rf"(?<![\w/.:-])((?:{folders})/[\w/-]+\.(?:py|yaml|md))", text)
    written_by_the_reader = {"conf/env/shout.yaml"}
    missing = [path for path in named if not (REPO / path).exists() and "/my_" not in path]
    printed_whole = page.name in ("a-new-idea.md", "everyday.md")
    assert printed_whole or set(missing) <= written_by_the_reader


def test_the_page_of_benchmarks_equals_the_kept_measurements() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    assert text == page(), "python -m benchmarks.page"
    assert all(f"## {program}\n" in text for program in programs())


async def test_the_environments_of_the_documentation_run_as_they_stand(monkeypatch, tmp_path):
    modules = {}
    sources = printed.files(DOCS / "environments.md")
    for path, source in ((p, source) for p, source in sources.items() if p.endswith(".py")):
        name = path.removesuffix(".py").replace("/", ".")
        modules[name] = module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, path, "exec"), module.__dict__)
    assert set(modules) == {"my_env", "my_pages", "my_package"}
    shout = modules["my_env"].Shout(num_train=2, reward_weights={"exact": 1.0})
    pages = modules["my_pages"].Pages()
    for env in (shout, pages):
        assert isinstance(env, Environment)
        example = env.examples("train")[0]
        messages = [*example.messages, assistant(example.info["answer"])]
        scored = await env.score(Episode(example, messages))
        assert set(env.reward_weights) <= set(scored)
        assert max(scored.values()) == 1.0
    held = Episode(pages.examples("train")[0], [])
    call = tool_call_entry("read", {"title": "Rome"})
    assert (await pages.toolbox.answer(call, held))["content"] == "The capital of Italy."
    assert len(pages.tool_specs) == 1

    parts = modules["my_package"]  # the functions of a composed environment
    (tmp_path / "index.json").write_text('{"Paris": "The capital of France."}')
    index = parts.load_index(path=str(tmp_path / "index.json"))
    assert parts.search("par", index, limit=1) == "Paris"
    episode = Episode(None, [assistant("Paris")])
    assert await parts.cited(episode, index, bonus=0.5) == 0.5
