"""Inside vLLM: what an adapter push leaves in the layers is looked at."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.server]


def test_a_matrix_that_vllm_does_not_hold_as_it_was_sent_is_named():
    from vllm.lora.peft_helper import PEFTHelper

    from rl.weights.vllm_proof import matrices_that_differ

    form = PEFTHelper(r=2, lora_alpha=6, target_modules=["q", "v", "o"])
    names = ["q", "v", "o"]
    sent = {(n, a): torch.randn(2, 5) if a else torch.randn(4, 2) for n in names for a in (0, 1)}

    def room(*parts):  # two slots of rank 8, the second one in use
        layer = SimpleNamespace()
        for a, stack in ((1, "lora_a_stacked"), (0, "lora_b_stacked")):
            tensors = [torch.zeros(2, 1, *((8, 5) if a else (4, 8))) for _ in parts]
            for tensor, part in zip(tensors, parts, strict=True):
                rows, columns = sent[part, a].shape
                tensor[1, 0, :rows, :columns] = sent[part, a] * (1 if a else 3)
            setattr(layer, stack, tuple(tensors))
        return layer

    manager = SimpleNamespace(
        modules={"qv": room("q", "v"), "o": room("o")}, packed_modules={"qv": ["q", "v"]}
    )

    def wrong(slot=1):
        return sorted(set(matrices_that_differ(manager, slot, sent, form)))

    assert wrong() == []
    assert wrong(slot=0) == sorted(names)
    manager.modules["qv"].lora_b_stacked[1][1, 0, 3, 1] += 1e-3
    assert wrong() == ["v"]
    del manager.modules["o"]
    assert wrong() == ["o", "v"]
