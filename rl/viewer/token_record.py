"""The tokens of one rollout: what was sampled, what training noted, why one has no gradient.

    tokens/step_000012.rollouts.parquet       token_ids mask mu version turns, of every token
    tokens/step_000012.trainer.rank*.parquet  pi old ref ... slope kept, of the sampled ones

`ratio` is pi / old where the step has old logprobs, else pi / mu, as the losses take it. `mismatch`
is what trainer and server differ by before the update: log old (or pi) - log mu. For tokens of an
earlier version it holds what training changed since, too.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers.decoders import DecodeStream

from rl.run.folder import RunFolder

_MAX_LOG_RATIO = 20.0  # where losses clamp it, and a double still holds its exponential
_METRIC = "metric_"
_NAMED = (
    "pi",
    "old",
    "ref",
    "entropy",
    "correction",
    "advantage",
    "weight",
    "loss",
    "slope",
    "kept",
)
NO_RECORD = "this step has no token record: train with record=all, or see docs/viewer.md"
REJECTED = "the rollout was rejected or left out, so nothing of it was trained on"


def read_record(
    run_folder: RunFolder, step: int, identity: str, *, used: bool, knobs: dict[str, Any]
) -> dict[str, Any]:
    """Return {rows, why}: `why` says what is missing, where something is.

    Args:
        run_folder: the run.
        step: of the rollout.
        identity: its id.
        used: whether it was trained on.
        knobs: the loss's numbers, to be quoted.

    """
    folder, name = run_folder.path / "tokens", f"step_{step:06d}"
    path = folder / f"{name}.rollouts.parquet"
    if not path.is_file() or not identity:
        return {"rows": [], "why": NO_RECORD}
    try:
        sampled = _lines(path, identity)
        trained = {
            line["row"]: line
            for rank in sorted(folder.glob(f"{name}.trainer.rank*.parquet"))
            for line in _lines(rank, identity)
        }
    except (OSError, pa.ArrowException) as error:
        return {"rows": [], "why": f"{name}: its token record cannot be read: {error}"}
    if not sampled:
        return {"rows": [], "why": "this rollout is not in the token record (record=sample?)"}
    why = ""
    if not used:
        why = REJECTED
    elif not trained:
        why = "the ranks have not written this step's record"
    tokenizer, problem = _tokenizer(run_folder)
    rows = []
    for line in sampled:
        row = _sampled_row(line, tokenizer)
        why = _add_training(row, trained.get(line["row"]), used, knobs) or why
        rows.append(row)
    return {"rows": rows, "why": "; ".join(filter(None, [why, problem]))}


def _lines(path: Path, identity: str) -> list[dict[str, Any]]:
    table = pq.read_table(path, filters=[("id", "=", identity)])
    return sorted(table.to_pylist(), key=lambda line: line["row"])


def _sampled_row(line: dict[str, Any], tokenizer: tokenizers.Tokenizer | None) -> dict[str, Any]:
    ids, mask = line["token_ids"], line["mask"]
    return {
        "row": line["row"],
        "ids": ids,
        "pieces": pieces(tokenizer, ids),
        "special": _special(tokenizer, ids),
        "mask": mask,
        "turns": line["turns"],
        "version": [v if m else None for v, m in zip(line["version"], mask, strict=True)],
        "mu": [_finite(x) if m else None for x, m in zip(line["mu"], mask, strict=True)],
    }


def _add_training(
    row: dict[str, Any], line: dict[str, Any] | None, used: bool, knobs: dict[str, Any]
) -> str:
    """Spread the ranks' numbers over the row's places; say what does not fit."""
    places = [i for i, sampled in enumerate(row["mask"]) if sampled]
    if line is None:
        row["reason"] = [REJECTED if m and not used else None for m in row["mask"]]
        return ""
    lengths = {len(values) for name, values in line.items() if isinstance(values, list)}
    if lengths - {len(places)}:
        return f"row {row['row']} has {len(places)} sampled tokens, its record {sorted(lengths)}"
    size = len(row["mask"])

    def spread(values: list[Any]) -> list[Any]:
        whole: list[Any] = [None] * size
        for place, value in zip(places, values, strict=True):
            whole[place] = value if isinstance(value, str) else _finite(value)
        return whole

    numbers = {name: line[name] for name in _NAMED if line.get(name) is not None}
    metrics = {
        name.removeprefix(_METRIC): values
        for name, values in line.items()
        if name.startswith(_METRIC) and values is not None
    }
    mu = [row["mu"][i] for i in places]
    pi, before = numbers.get("pi"), numbers.get("old", numbers.get("pi"))
    if pi is not None and before is not None:
        anchor = numbers.get("old", mu)
        numbers["ratio"] = [_ratio(a, b) for a, b in zip(pi, anchor, strict=True)]
        numbers["mismatch"] = [_difference(a, b) for a, b in zip(before, mu, strict=True)]
    row |= {name: spread(values) for name, values in numbers.items()}
    row["metrics"] = {name: spread(values) for name, values in metrics.items()}
    reasons: list[Any] = [
        no_gradient(
            {name: values[i] for name, values in numbers.items()},
            [name for name, values in metrics.items() if values[i]],
            knobs,
        )
        for i in range(len(places))
    ]
    row["reason"] = spread(reasons)
    return ""


def no_gradient(token: dict[str, Any], flagged: list[str], knobs: dict[str, Any]) -> str | None:
    """Return why a token has no gradient, None where it has one or nobody knows.

    Args:
        token: its numbers by name.
        flagged: names of the loss's metrics that are not 0 for it.
        knobs: the loss's numbers.

    """
    slope = token.get("slope")
    if slope is None or not math.isfinite(slope):
        return None
    if slope != 0:
        return None
    advantage, ratio = token.get("advantage"), token.get("ratio")
    if token.get("weight") == 0:
        return "its weight in the objective is 0"
    if token.get("correction") == 0:
        return "the correction for the server's logprobs left it out (correction 0)"
    if token.get("kept") == 0:
        return "it did not reach the objective"
    if advantage == 0:
        return "advantage 0: its rollout is as good as its group"
    clips = [name for name in flagged if "clip" in name or "mask" in name or "drop" in name]
    if clips and ratio is not None and advantage is not None:
        sign = ">" if advantage > 0 else "<"
        bounds = ", ".join(f"{k}={v:g}" for k, v in knobs.items() if "clip" in k)
        why = f"ratio {ratio:.2f} and A {sign} 0: clipped ({', '.join(clips)}"
        return f"{why}; loss: {bounds})" if bounds else f"{why})"
    return "the objective does not change with its probability"


def _ratio(pi: float | None, anchor: float | None) -> float | None:
    difference = _difference(pi, anchor)
    if difference is None:
        return None
    return math.exp(max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, difference)))


def _difference(a: float | None, b: float | None) -> float | None:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    return a - b


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def pieces(tokenizer: tokenizers.Tokenizer | None, ids: list[int]) -> list[str]:
    """Return each token's text; of those that make one character the last has it, the others ""."""
    if tokenizer is None:
        return [f"{number} " for number in ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, number) or "" for number in ids]


def _special(tokenizer: tokenizers.Tokenizer | None, ids: list[int]) -> list[bool]:
    if tokenizer is None:
        return [False] * len(ids)
    added = tokenizer.get_added_tokens_decoder()
    return [number in added for number in ids]


def _tokenizer(run_folder: RunFolder) -> tuple[tokenizers.Tokenizer | None, str]:
    try:
        path = run_folder.model() / "tokenizer.json"
    except OSError:
        path = run_folder.path / "model.txt"
    if not path.is_file() or path.name != "tokenizer.json":
        return None, f"ids in the place of text, for the run's tokenizer is not here ({path})"
    return _loaded(path), ""


@lru_cache(maxsize=8)
def _loaded(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))
