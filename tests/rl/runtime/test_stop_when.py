"""stop_when: conditions on a metric."""

import math

import pytest

from rl.runtime.stop_when import StopWhen, is_fulfilled

ROW = {"step": 3, "errors": 0.0, "eval/reward": 0.9, "eval/pass@1": None, "train/loss": math.nan}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("eval/reward > 0.89", True),
        ("eval/reward>0.9", False),
        (" eval/reward >= 9e-1 ", True),
        ("eval/reward < +0.91", True),
        ("eval/reward <= -0.9", False),
        ("eval/reward <= 0.9", True),
        ("eval/reward < 0.9", False),
        ("step >= 3", True),
        ("errors < 0.1", True),
        ("eval/pass@1 < 1", False),  # null in metrics.jsonl
        ("train/loss < 1", False),  # not a number
        ("eval/pass@8 < 1", False),  # not in this line
    ],
)
def test_a_condition_compares_one_metric_with_a_number(condition: str, holds: bool) -> None:
    assert StopWhen.of(condition).holds(ROW) == holds
    assert is_fulfilled(condition, [{"step": 2}, ROW]) == holds
    assert not is_fulfilled(condition, [])


@pytest.mark.parametrize("text", ["0.9 <", "eval/reward", "a == 1", "a > b > 1", "a > x", ""])
def test_another_text_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a condition: write a metric of metrics\.jsonl"):
        StopWhen.of(text)
    assert not is_fulfilled(text, [ROW])
    assert not is_fulfilled(None, [ROW])
