"""What an update asks of its device, traced on tensors without memory (meta) as on a GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rl.learner.logprobs import PolicyModule
from rl.learner.weight_gradients import use_float32_gradients
from tests.support.tiny_policy import model_folder

META = torch.device("meta")
ROWS, LENGTH = 3, 8


class OnDevice(TorchDispatchMode):
    """Collect operations with CPU tensors, and operations for which the host waits.

    The size of a selection by a mask is unknown on meta, so it is set to all of the mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu, self.waits = set[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(tensor.device != META for tensor in tensors((args, kwargs))):
            self.on_cpu.add(name)
        if name in ("index", "index_put", "index_put_") and args[1][0].dtype == torch.bool:
            self.waits.append(name)
            chosen, mask = args[0], args[1][0]
            if name != "index":
                return chosen
            return chosen.new_empty((mask.numel(), *chosen.shape[mask.ndim :]))
        if name == "_local_scalar_dense":  # a value that decides what Python does next
            self.waits.append(name)
            return True
        out = func(*args, **(kwargs or {}))
        if any(tensor.device != META for tensor in tensors(out)):
            self.on_cpu.add(name)
        return out


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("candidates", [0, 3])
def test_an_update_stays_on_its_device_and_waits_only_for_the_completion_mask(candidates, tmp_path):
    config = AutoConfig.from_pretrained(model_folder(tmp_path / "model"))
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        token_ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        likely = torch.zeros(ROWS * (LENGTH - 1), candidates, dtype=torch.int64)
    module = PolicyModule(model, chunk=7)
    use_float32_gradients(module)
    with OnDevice() as seen:
        logprobs, entropies, *others = module(
            token_ids, mask, 0.8, entropies=True, candidates=likely if candidates else None
        )
        sum([logprobs.sum(), *(other.sum() for other in others)]).backward()
    assert entropies.shape == (ROWS * (LENGTH - 1),)
    assert seen.on_cpu == set()
    # transformers asks whether rows are packed. The mask selects hidden states and targets.
    assert seen.waits == ["_local_scalar_dense", "index", "index", "index_put"]
