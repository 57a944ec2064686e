"""The table of an evaluation's results for the terminal."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl.evaluation.summary import Summary
from rl.runtime.text import printable

_MOSTLY_EQUAL = 0.9  # minimum zero_spread for advice, the same as in rl/trainer/alarms.py
_LONGEST_CAUSE = 500  # maximum number of characters of an error text


def result_lines(summary: Summary, threshold: float, folder: Path) -> RenderableType:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    summaries = {"all": summary, **summary.envs} if summary.envs else {"": summary}
    table.add_column("", style="dim")
    for name in summaries:
        table.add_column(_printable(name), justify="right")
    cells = [_cell_by_label(one) for one in summaries.values()]
    for label in dict.fromkeys(label for column in cells for label in column):
        table.add_row(_printable(label), *(column.get(label, "-") for column in cells))
    lines: list[RenderableType] = [Text(), table, Text()]
    passes = f"a rollout passes if its reward is >= {threshold:g}"
    lines.append(Text(f"{passes}; pass@k and ± (one standard error) are over examples", "dim"))
    for name, one in (summary.envs or {"": summary}).items():
        # zero_spread is NaN with one rollout per example.
        if one.zero_spread >= _MOSTLY_EQUAL and 2 * one.num_scored > one.num_rollouts:
            text = f"{name}: {one.zero_spread:.0%} of the groups have equal rewards ("
            text += f"{one.num_rollouts // one.num_examples} rollouts per example): choose "
            text += "harder" if one.passes[1] > 0.5 else "easier"
            text += " examples or larger groups (docs/troubleshooting.md, no spread)"
            lines.append(_printable(text.lstrip(": "), "yellow"))
    lines += error_lines(summary.errors)
    lines.append(_printable(f"{folder}/  summary.json, rollouts.jsonl, rollouts.html", "dim"))
    return Group(*lines)


def error_lines(errors: Mapping[str, int]) -> list[Text]:
    first = list(errors.items())[:5]
    return [_printable(f"  {count} x {cause[:_LONGEST_CAUSE]}", "red") for cause, count in first]


def _printable(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _cell_by_label(summary: Summary) -> dict[str, str]:
    numbers = {
        "examples": f"{summary.num_examples}",
        "rollouts": f"{summary.num_rollouts}",
        "reward": f"{summary.reward:.3f} ± {summary.reward_standard_error:.3f}",
        **{f"  {name}": f"{value:.3f}" for name, value in summary.rewards.items()},
        **{f"pass@{k}": f"{share:.1%}" for k, share in summary.passes.items()},
        "no spread": f"{summary.zero_spread:.1%}",
        "mean length": f"{summary.mean_length:,.1f} tokens",
        "max length": f"{summary.max_length:,}",
        "turns": f"{summary.turns:.2f}",
    }
    if summary.tool_calls:
        numbers["tool calls"] = f"{summary.tool_calls:.2f}"
        numbers["tool errors"] = f"{summary.tool_errors:.2f}"
    numbers |= {f"stop: {reason}": f"{share:.1%}" for reason, share in summary.stop_reasons.items()}
    if summary.num_scored < summary.num_rollouts:
        numbers["not scored"] = f"{summary.num_rollouts - summary.num_scored}"
    return {label: replace_nan(text) for label, text in numbers.items()}


def replace_nan(text: str) -> str:
    return text.replace(" ± nan", "").replace("nan%", "-").replace("nan", "-")
