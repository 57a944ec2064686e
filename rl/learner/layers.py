"""Make the layers of a model train with less memory, or in less time.

torch.compile compiles the first layer, and all other layers reuse the result. Names of weights do
not change. Embeddings, the chunked output head and DeepSpeed stay uncompiled.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass."""
    # Reentrant checkpoints lose the gradient if the embeddings are frozen (LoRA).
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile each layer for any number and length of rows; raise ValueError if there is none."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"trainer.compile=true finds no layers in a {kind}: set it to false")
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
