"""A key or a password that would stand in config.yaml is refused, and not repeated thereby."""

import pytest

from rl.config.secrets import secret_problems


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@host/v1", "http://:hunter2@host", "HTTPS://hunter2@host:8000/v1"]
)
def test_a_url_with_a_password_is_refused_without_repeating_it(url):
    (problem,) = secret_problems({"env": {"judge": [{"url": url}]}})
    assert problem.startswith("env.judge.0.url holds a password")
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "key", ["sk-abcdef0123456789", "abcdef0123456789abcdef", "AKIAIOSFODNN7EXAMPLE", "hf_aBcDeF"]
)
def test_a_key_in_the_place_of_its_variable_is_refused_without_repeating_it(key):
    (problem,) = secret_problems({"client": {"api_key_variable": key}})
    assert problem.startswith("client.api_key_variable is not the name of an environment variable")
    assert key not in problem


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "mykey", None])
def test_names_of_variables_are_fine_if_they_look_so_or_are_set(name, monkeypatch):
    monkeypatch.setenv("mykey", "x")
    urls = {"url": "http://host:8000/v1", "text": "mail me@host: now", "n": 3}
    assert list(secret_problems({"client": {"api_key_variable": name, **urls}})) == []
