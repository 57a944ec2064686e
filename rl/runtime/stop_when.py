"""stop_when: a condition on one metric that ends a run early, such as "eval/reward > 0.9"."""

import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

_FORM = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+.\w]+)\s*")
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class StopWhen:
    metric: str
    sign: str
    limit: float

    @classmethod
    def of(cls, text: str) -> Self:
        try:
            metric, sign, limit = _FORM.fullmatch(text).groups()  # pyright: ignore[reportOptionalMemberAccess]
            return cls(metric, sign, float(limit))
        except (AttributeError, ValueError):
            raise ValueError(
                f"{text} is not a condition: write a metric of metrics.jsonl, one of > >= < <=, "
                "and a number, such as 'eval/reward > 0.9'"
            ) from None

    def holds(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.metric)
        return value is not None and _COMPARE[self.sign](value, self.limit)


def is_fulfilled(stop_when: Any, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the newest row of metrics meets the condition `stop_when` of a run."""
    with suppress(ValueError):  # stop_when is null, or not a condition
        return bool(rows) and StopWhen.of(str(stop_when)).holds(rows[-1])
    return False
