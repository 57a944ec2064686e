"""What runs inside vLLM refuses what the trainer did not write. Needs vLLM's own modules."""

import pytest
import torch
from safetensors.torch import save_file

from rl.weights.fingerprint import fingerprint

pytestmark = pytest.mark.server


def test_weights_that_are_not_those_that_were_sent_are_refused(tmp_path):
    from rl.weights.vllm_plugin import ShmUpdateInfo, read

    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    path, mark = str(tmp_path / "weights"), fingerprint(weights)
    save_file(weights, path)
    assert read(ShmUpdateInfo(path=path, fingerprint=mark)).keys() == weights.keys()
    save_file({**weights, "a": torch.arange(4.0) + 1e-6}, path)
    with pytest.raises(RuntimeError, match=f"the trainer wrote {mark}, vLLM read"):
        read(ShmUpdateInfo(path=path, fingerprint=mark))
