"""Write the HTML page of a comparison, on which the colour of a token shows its gradients."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import torch
from torch import Tensor

from lab.losses.arms import RECORDED, Arm
from lab.losses.recorded import RecordedBatch
from lab.viewer.token_record import pieces

NUM_ROLLOUTS = 5  # rollouts shown per loss


def write_page(
    path: Path,
    arms: Sequence[Arm],
    batches: Sequence[RecordedBatch],
    grads: Sequence[Sequence[Tensor]],  # gradient [N] by arm and batch
    tokenizer: tokenizers.Tokenizer | None,
    **shown: Any,
) -> None:
    """Write the page. `shown`: run, basis, columns and rows of the table."""
    shown["arms"] = [
        {
            "name": arm.name,
            "changes": arm.changes,
            "ignored": arm.ignored,
            "rollouts": _rollouts(batches, grads[0], own, tokenizer, arm.name),
        }
        for arm, own in zip(arms[1:], grads[1:], strict=True)
    ]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.losses").joinpath("page.html").read_text())
    path.write_text(template.render(**shown), errors="replace")


def _rollouts(
    batches: Sequence[RecordedBatch],
    base: Sequence[Tensor],
    arm: Sequence[Tensor],
    tokenizer: tokenizers.Tokenizer | None,
    name: str,
) -> list[dict[str, Any]]:
    """Return the rows of tokens whose gradients differ most, for the page."""
    gaps = []
    for number, batch in enumerate(batches):
        by_row = torch.zeros(len(batch.rows), dtype=torch.float64)
        difference = (arm[number] - base[number]).abs().double()
        by_row.index_add_(0, batch.tokens.sequence_ids, difference)
        gaps += [(gap, number, row) for row, gap in enumerate(by_row.tolist()) if gap]
    shown = []
    for _, number, row in sorted(gaps, reverse=True)[:NUM_ROLLOUTS]:
        batch = batches[number]
        inside = (batch.tokens.sequence_ids == row).nonzero()[:, 0]
        texts = pieces(tokenizer, batch.token_ids[inside].tolist())
        pair = {RECORDED: base[number][inside], name: arm[number][inside]}
        largest = max(grads.abs().max().item() for grads in pair.values())
        shown.append(
            {
                "step": batch.step,
                "update": batch.update,
                "id": batch.rollout_ids[row],
                "advantage": batch.tokens.advantages[inside].mean().item(),
                "lines": [
                    (label, _coloured(texts, grads, largest, batch, inside))
                    for label, grads in pair.items()
                ],
            }
        )
    return shown


def _coloured(
    texts: list[str], grads: Tensor, largest: float, batch: RecordedBatch, inside: Tensor
) -> list[dict[str, Any]]:
    return [
        {
            "text": text,
            "way": "more" if grad < 0 else "less",
            "much": round(0.75 * abs(grad) / largest, 3) if largest else 0,
            "title": f"gradient {grad:.3g}, pi/anchor {ratio:.4g}",
        }
        for text, grad, ratio in zip(
            texts, grads.tolist(), batch.ratios[inside].tolist(), strict=True
        )
    ]
