"""endpoints.toml: a name instead of an address, for evaluation, judge, teacher and reflection."""

import pytest

from rl.config.schema import ConfigError
from tests.support.composing import composed

TEXT = """
[large]
url = "https://host/v1"
model = "large-1"
api_key_variable = "LARGE_KEY"
[local]
url = "http://localhost:8000/v1"
model = "small"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "endpoints.toml").write_text


@pytest.mark.parametrize(
    ("primary", "overrides", "path"),
    [
        ("evaluate", ["client=messages", "client.url=large"], "client"),
        ("train", ["env=wiki-search-judged", "env.judge.url=large"], "env.judge"),
        ("train", ["loss=distill", "reference=endpoint", "reference.url=large"], "reference"),
        ("optimize_prompt", ["model.path=x", "reflection.base_url=large"], "reflection"),
    ],
)
def test_a_name_stands_for_the_url_the_model_and_the_key(primary, overrides, path, write):
    write(TEXT)
    node = composed(*overrides, primary=primary)
    for key in path.split("."):
        node = node[key]
    assert node.get("url", node.get("base_url")) == "https://host/v1"
    assert node["model"] == "large-1"
    assert node.get("api_key_variable", "LARGE_KEY") == "LARGE_KEY"


def test_a_model_and_an_address_of_the_command_line_are_kept(write):
    write(TEXT)
    for url, kept in (("local", "http://localhost:8000/v1"), ("http://a/v1", "http://a/v1")):
        given = ["client=messages", f"client.url={url}", "client.model=b"]
        client = composed(*given, primary="evaluate")["client"]
        assert (client["url"], client["model"]) == (kept, "b")
        assert client["api_key_variable"] == "OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT, "endpoints.toml has no endpoint larg: use large or local"),
        ("[large]\nurl = 'x'\nmodel = 'y'\nkey = 'z'\n", r"\[large\] needs url and model"),
        ("[large", "endpoints.toml cannot be read"),
    ],
)
def test_a_wrong_name_or_file_is_refused(text, said, write):
    write(text)
    with pytest.raises(ConfigError, match=said):
        composed("client=messages", "client.url=larg", primary="evaluate")
