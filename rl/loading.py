"""The model of a run, ready to be trained: read, adapted, in training mode."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from rl.config import Run, build
from rl.model_files import load_model


def load_trained(run: Run, folder: Path) -> PreTrainedModel:
    """Return the model in `folder` with the run's adapter."""
    model = load_model(folder, getattr(torch, run.model["dtype"]), run.seed)
    model = build(run.adapter)().attach(model, run.seed, _public_name(run, folder))
    if run.trainer["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _public_name(run: Run, folder: Path) -> str:
    """What others may call the model: its name on the hub, else where it lies here."""
    name = run.model.get("path")
    return name if name and not Path(name).expanduser().exists() else str(folder)
