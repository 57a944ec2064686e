"""A teacher on the real vLLM gives the same logprobs as the same teacher loaded in the test."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl.learner.logprobs import Rows
from rl.learner.ranks import Ranks
from rl.learner.reference.endpoint import Endpoint
from rl.learner.reference.local import FrozenModel
from rl.learner.reference.protocol import ReferenceSetting
from rl.runtime.failure import RunFailed
from tests.support import tiny_policy
from tests.support.serving import serving

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]


def sharp_teacher(folder: Path) -> Path:
    """Return a teacher with sharp distributions: an untrained model with weights times three."""
    sizes = {"hidden_size": 64, "head_dim": 32}  # the smallest for which vLLM has a CPU kernel
    folder = tiny_policy.model_folder(folder, **sizes)
    model = tiny_policy.exact_model(folder, seed=5).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    model.save_pretrained(folder)
    return folder


def setting_of(folder) -> ReferenceSetting:
    ranks = Ranks(0, 1, torch.device("cpu"))
    policy = SimpleNamespace(ranks=ranks, has_adapter=False, vocabulary=320)
    sizes = {"logprob_chunk": 7, "max_seq_len": 63}
    more = {"temperature": 1.0, "seed": 0, "reads_candidates": True}
    return ReferenceSetting(policy=policy, model=folder, dtype=torch.float32, **sizes, **more)


def remote(url: str, top_k: int) -> Endpoint:
    more = {"api_key_variable": None, "timeout": 240.0, "max_retries": 0, "sees_hint": False}
    return Endpoint(url=url, model="them", top_k=top_k, **more)


def rows() -> list[Rows]:
    """Return two micro-batches of padded rows with turns; the last row has no completion token."""
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 256, (6, 40), generator=random)
    mask = torch.rand(6, 40, generator=random) < 0.4
    mask[:, :3] = False
    mask[1, 20:] = False
    mask[5] = False
    envs = ("words",) * 6
    return [Rows(token_ids[:4], mask[:4], envs[:4]), Rows(token_ids[4:], mask[4:], envs[4:])]


def test_the_servers_likeliest_tokens_are_those_of_the_local_model(tmp_path):
    folder, limit = sharp_teacher(tmp_path / "model"), {"max-model-len": "64"}
    setting, more = setting_of(folder), {"revision": None, "dtype": "float32", "sees_hint": False}
    with serving(folder, tmp_path / "vllm.log", dtype="float32", **limit) as url:
        for top_k in (1, 5, 20):
            local = FrozenModel(path=str(folder), top_k=top_k, **more)
            both = [one.start(setting).score(rows()) for one in (remote(url, top_k), local)]
            for served, loaded in zip(*both, strict=True):
                for name in ("logprobs", "candidate_logprobs"):
                    given = (getattr(served, name), getattr(loaded, name))
                    torch.testing.assert_close(*given, rtol=1e-3, atol=1e-3)
                # Two tokens of almost equal probability may be in another order.
                assert (served.candidates == loaded.candidates).float().mean() > 0.95
        # Without a comparison, only the given tokens are requested.
        alone = remote(url, 999).start(replace(setting, reads_candidates=False)).score(rows())
        assert alone[0].candidates is None
        for one, other in zip(alone, both[0], strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
        with pytest.raises(RunFailed, match="returns at most 20 likely tokens"):
            remote(url, 21).start(setting).score(rows())
