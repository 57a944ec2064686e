"""Values on the very edge of a rule, and the defaults that the README speaks of."""

import pytest

from rl.config.check import check
from rl.config.limits import range_problems
from rl.config.transport import VLLM_RANKS, obstacle
from tests.support.composing import changed, composed, only_problem


@pytest.fixture(scope="module")
def config():
    return composed("output_dir=nowhere")


def test_the_default_is_one_step_off_policy_from_the_policy_s_own_distribution(config):
    sampler = config["sampler"]
    assert (sampler["max_staleness"], sampler["temperature"]) == (1, 1.0)
    assert (sampler["top_p"], sampler["top_k"], sampler["min_p"]) == (1.0, -1, 0.0)


def test_a_turn_as_long_as_the_row_leaves_no_room_and_one_token_less_does(config):
    longest = config["max_seq_len"]
    full = changed(config, {"sampler.max_tokens": longest})
    assert "leaves no room for the prompt" in only_problem(full)
    check(changed(config, {"sampler.max_tokens": longest - 1}))


@pytest.mark.parametrize(("dual", "refused"), [(1.0, True), (1.01, False), (None, False)])
def test_a_dual_clip_must_exceed_one(dual, refused):
    config = changed(composed("loss=ppo_clip", "output_dir=nowhere"), {"loss.dual_clip": dual})
    if refused:
        assert "must exceed 1" in only_problem(config)
    else:
        check(config)


@pytest.mark.parametrize(("top_p", "problems"), [(0.0, 1), (0.01, 0), (1.0, 0), (1.01, 1)])
def test_both_ends_of_a_range_count(top_p, problems):
    assert len(list(range_problems({"sampler": {"top_p": top_p}}))) == problems


def test_the_largest_rank_that_vllm_takes_is_taken():
    node = {"_target_": "rl.model.lora.LoRA", "modules_to_save": [], "rank": VLLM_RANKS[-1]}
    model = {"_target_": "rl.model.pretrained.PretrainedModel"}
    assert obstacle(node, model) is None
    assert "at most" in (obstacle({**node, "rank": VLLM_RANKS[-1] + 1}, model) or "")
