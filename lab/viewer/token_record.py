"""Read the tokens of one rollout: sampled values, training record, and reasons for zero gradients.

pi, old and mu are a token's probabilities: pi when its loss is computed, old before the step's
first update, mu in vLLM. This module adds two columns to the record. If the step has old logprobs,
`ratio` is pi / old and `mismatch` is log old - log mu, else they are pi / mu and log pi - log mu.
If an earlier policy version sampled a token, `mismatch` also contains the policy's change since.
docs/token-record.md explains the other columns.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers.decoders import DecodeStream

from rl.runtime.folder import RunFolder
from rl.runtime.token_files import RecordedRow

_MAX_LOG_RATIO = 20.0  # the losses clamp log ratios at the same limit
_METRIC = "metric_"
NO_RECORD = "this step has no token record: train with record=all or record=sample"
NOT_TRAINED = "no trainer rank recorded this rollout: the step is unfinished or trained nothing"
REJECTED = "not trained: the buffer rejected the group, or the rollout was cut off or not scored"


def tokens_of(
    run_folder: RunFolder,
    step: int,
    identity: str,
    read: Callable[[int], Mapping[str, list[RecordedRow]]],
    *,
    used: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return {rows, why} for JSON. `why` says why data are missing, or is "".

    A row occurs once per update of its batch. `identity`: rollout id. `read`: maps a step to its
    rows by rollout id. `used`: field of the rollout's line. `options`: the loss's numeric options.
    """
    if not identity or not run_folder.tokens_of(step, "rollouts").is_file():
        return {"rows": [], "why": NO_RECORD}
    try:
        recorded = read(step).get(identity)
    except (OSError, ValueError, pa.ArrowException) as error:
        return {"rows": [], "why": f"the token record of step {step} cannot be read: {error}"}
    if not recorded:
        return {"rows": [], "why": "this group was not recorded: record=all records every group"}
    is_trained = any(row.trained for row in recorded)
    why = REJECTED if not used else "" if is_trained else NOT_TRAINED
    tokenizer, problem = tokenizer_of(run_folder)
    rows = [_row_as_json(row, tokenizer, used, options) for row in recorded]
    return {"rows": rows, "why": "; ".join(filter(None, [why, problem]))}


def _row_as_json(
    recorded: RecordedRow,
    tokenizer: tokenizers.Tokenizer | None,
    used: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    sampled, trained = recorded.sampled, recorded.trained
    ids, mask = sampled["token_ids"].tolist(), sampled["mask"]
    metrics = {n.removeprefix(_METRIC): x for n, x in trained.items() if n.startswith(_METRIC)}
    numbers = {name: x for name, x in trained.items() if not name.startswith(_METRIC)}
    if "pi" in numbers:
        before = numbers.get("old", numbers["pi"])
        change = numbers["pi"] - numbers.get("old", sampled["mu"])
        clamped = np.clip(change, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        numbers |= {"ratio": np.exp(clamped), "mismatch": before - sampled["mu"]}

    added = tokenizer.get_added_tokens_decoder() if tokenizer else {}

    def why_zero(i: int) -> str | None:
        if not mask[i]:
            return None
        if not recorded.trained:
            return None if used else REJECTED
        flagged = [name for name, values in metrics.items() if values[i]]
        return zero_reason({name: float(x[i]) for name, x in numbers.items()}, flagged, options)

    return {
        "row": recorded.row,
        "update": recorded.update,
        "ids": ids,
        "pieces": pieces(tokenizer, ids),
        "special": [number in added for number in ids],
        "mask": mask.tolist(),
        "turns": sampled["turns"].tolist(),
        "version": [v if v >= 0 else None for v in sampled["version"].tolist()],
        "mu": _as_json_numbers(sampled["mu"], mask),
        **{name: _as_json_numbers(values, mask) for name, values in numbers.items()},
        "metrics": {name: _as_json_numbers(values, mask) for name, values in metrics.items()},
        "reason": [why_zero(i) for i in range(len(ids))],
    }


def _as_json_numbers(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """Round to six significant digits. Values outside the mask, NaN and infinity become None."""
    return [
        float(f"{x:.6g}") if m and math.isfinite(x) else None
        for x, m in zip(values.tolist(), mask, strict=True)
    ]


def zero_reason(token: dict[str, Any], flagged: list[str], options: dict[str, Any]) -> str | None:
    """Return why a token's gradient is 0, or None if it is not 0 or was not recorded.

    `flagged`: names of the loss metrics that are not 0 at the token.
    """
    grad = token.get("grad")
    if grad is None or not math.isfinite(grad) or grad != 0:
        return None
    advantage, ratio = token.get("advantage"), token.get("ratio")
    if token.get("weight") == 0:
        return "the token's weight in the objective is 0"
    if token.get("correction") == 0:
        return "the correction for vLLM's logprobs dropped the token (correction 0)"
    if advantage == 0:
        return "advantage 0: the reward equals its baseline, such as the mean of the group"
    clips = [name for name in flagged if "clip" in name or "mask" in name or "drop" in name]
    if clips and ratio is not None and advantage is not None:
        sign = ">" if advantage > 0 else "<"
        bounds = ", ".join(f"{k}={v:g}" for k, v in options.items() if "clip" in k)
        why = f"ratio {ratio:.2f} and advantage {sign} 0: clipped ({', '.join(clips)}"
        return f"{why}; loss: {bounds})" if bounds else f"{why})"
    return "the objective does not change with the token's probability"


def pieces(tokenizer: tokenizers.Tokenizer | None, ids: list[int]) -> list[str]:
    """Return the text of each token, or its id if there is no tokenizer.

    If several tokens form one character, the last of these tokens gets the character.
    """
    if tokenizer is None:
        return [f"{number} " for number in ids]
    stream, shown = DecodeStream(skip_special_tokens=False), []
    for number in ids:
        try:
            piece = stream.step(tokenizer, number)
        except Exception:  # noqa: BLE001 the bytes of earlier tokens form no character
            stream = DecodeStream(skip_special_tokens=False)
            piece = stream.step(tokenizer, number)
        shown.append(piece or "")
    return shown


def tokenizer_of(run_folder: RunFolder) -> tuple[tokenizers.Tokenizer | None, str]:
    with suppress(OSError, ValueError):  # raised if model.txt is missing or damaged
        path = run_folder.initial_model() / "tokenizer.json"
        if path.is_file():
            return _load_tokenizer(path), ""
    return None, "token ids instead of text, because the run's tokenizer is missing"


@lru_cache(maxsize=8)
def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))
