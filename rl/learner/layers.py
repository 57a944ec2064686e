"""What is done to the layers of a model before it trains: less memory, or less time.

Layers are compiled one by one, in place: all of them share what was compiled for the first, names
of weights stay, and what surrounds them (embeddings, the chunked output head, DeepSpeed) is plain.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep nothing of a layer for the backward pass but its input."""
    # Reentrant checkpoints lose the gradient where the embeddings are frozen (LoRA).
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Let torch.compile have each layer, for rows of any number and length.

    Raises:
        ValueError: transformers marks no layers in a model of this kind.

    """
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"trainer.compile=true finds no layers in a {kind}: set it to false")
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
