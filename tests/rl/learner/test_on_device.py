"""What an update asks of its device and its memory, traced on tensors without memory (meta)."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rl.learner import logprobs as logprobs_module
from rl.learner.logprobs import PolicyModule
from rl.learner.weight_gradients import use_float32_gradients
from rl.model.shared_prefixes import share_prefixes, shares_prefixes
from tests.support.tiny_policy import model_folder

META = torch.device("meta")
ROWS, LENGTH, VOCAB, HIDDEN, CHUNK = 3, 8, 320, 32, 7


class OnDevice(TorchDispatchMode):
    """Collect operations with CPU tensors, operations for which the host waits, and logits.

    The size of a selection by a mask is unknown on meta, so it is set to all of the mask. A copy to
    the host returns ones. A copy from the host is no operation with a CPU tensor, and the host does
    not wait for it if it is not blocking.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu, self.waits, self.most_logits = set[str](), list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "_to_copy" and kwargs.get("device", args[0].device) != args[0].device:
            if args[0].device == META:
                self.waits.append("to the host")
                return torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu")
            self.waits += [] if kwargs.get("non_blocking") else ["to the device"]
            return func(*args, **kwargs)
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
        out = func(*args, **kwargs)
        if any(tensor.device != META for tensor in tensors(out)):
            self.on_cpu.add(name)
        for tensor in filter(is_logits, tensors(out)):
            self.most_logits = max(self.most_logits, tensor.numel() // VOCAB)
        return out


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_logits(tensor: torch.Tensor) -> bool:
    """Return whether it is [tokens, V]; the weight of the head, transposed, is [H, V]."""
    return tensor.shape[-1:] == (VOCAB,) and tensor.shape != (HIDDEN, VOCAB)


# transformers asks whether rows are packed. The mask selects hidden states and targets.
PLAIN = ["_local_scalar_dense", "index", "index", "index_put"]
# Rows are packed on the host, which copies token ids and mask. The mask selects targets.
SHARED = ["to the host", "to the host", "index"]


@pytest.mark.parametrize("waits", [PLAIN, SHARED], ids=["plain", "shared"])
def test_an_update_stays_on_its_device_waits_only_where_listed_and_keeps_no_logits(
    waits, tmp_path, monkeypatch
):
    monkeypatch.setattr(logprobs_module, "_has_plain_logits", lambda *_: True)  # reads values
    config = AutoConfig.from_pretrained(model_folder(tmp_path / "model"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if waits is SHARED:
        share_prefixes(model)  # before the move, because it computes test rows
        assert shares_prefixes(model)
    model.to(META)
    with META:
        token_ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        likely = torch.zeros(ROWS * (LENGTH - 1), 3, dtype=torch.int64)
    module, kept = PolicyModule(model, chunk=CHUNK, kl_from_uniform=True), []
    use_float32_gradients(module)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with OnDevice() as seen, hooks:
        outputs = module(token_ids, mask, 0.8, entropies=True, candidates=likely)
        logprobs, entropies, _, of_candidates = outputs
        (logprobs.sum() + of_candidates.sum()).backward()
    assert entropies.shape == (ROWS * (LENGTH - 1),)
    # from_numpy and numpy() call these two on the host's copies.
    assert seen.on_cpu == ({"detach", "lift_fresh"} if waits is SHARED else set())
    assert seen.waits == waits
    # Logits exist for one chunk at once, and none of them wait for the backward pass.
    assert seen.most_logits == CHUNK < len(entropies)
    assert kept
    assert not [tensor for tensor in kept if is_logits(tensor)]
