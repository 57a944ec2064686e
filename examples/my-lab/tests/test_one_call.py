"""Test where a turn ends with this sampler, in the chat format of model=tiny."""

from typing import Any

import pytest
from composing import composed
from renderers import Renderer

from envs.messages import tool_call, user
from my_lab.one_call import OneCallSampler, end_of_call
from rl.config.build import build
from rl.model.tokenizer import load_renderer
from rl.sampling.demonstrations import completion_ids


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Return the chat format of model=tiny, from a model folder without weights."""
    model = build(composed("model=tiny")["model"])()
    return load_renderer(model.prepare(tmp_path_factory.mktemp("model") / "tiny"), model.renderer)


def sampler(*overrides: str) -> OneCallSampler:
    return build(composed("sampler=one_call", *overrides)["sampler"])()


def test_the_call_s_last_token_ends_the_turn(renderer: Renderer) -> None:
    stop: Any = sampler().sampling(renderer)["stop_token_ids"]
    assert stop == [*renderer.get_stop_token_ids(), end_of_call(renderer)]
    said = completion_ids(renderer, tool_call("open_locker", number=3))
    assert [token for token in said if token in stop] == said[-2:]  # the tokens that end both


def test_everything_else_is_as_with_any_other_sampler(renderer: Renderer) -> None:
    with_limit = sampler("sampler.temperature=0.7").sampling(renderer)
    without = sampler("sampler.temperature=0.7", "sampler.one_call=false")
    plain = build(composed("sampler=async", "sampler.temperature=0.7")["sampler"])()
    assert without.sampling(renderer) == plain.sampling(renderer)
    assert {**with_limit, "stop_token_ids": None} == {
        **plain.sampling(renderer),
        "stop_token_ids": None,
    }


def test_a_turn_that_ends_with_its_call_is_understood_and_extended(renderer: Renderer) -> None:
    question: Any = user("start at locker 3")
    prompt = renderer.render_ids([question], add_generation_prompt=True)
    sampled = completion_ids(renderer, tool_call("open_locker", number=3))[:-1]  # no stop token
    (call,) = renderer.parse_response(sampled).tool_calls
    assert (call.name, call.arguments) == ("open_locker", {"number": 3})
    note: Any = {"role": "tool", "tool_call_id": "call_0", "content": "go to 7"}
    following = renderer.bridge_to_next_turn(prompt, sampled, [note])
    assert following is not None  # None would begin a new row
    assert following.token_ids[: len(prompt + sampled)] == prompt + sampled
