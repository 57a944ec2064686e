"""A teacher on the real vLLM gives the same logprobs as the same teacher loaded in the test."""

from dataclasses import replace
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a teacher with sharp distributions: an untrained model with weights times three."""
    sizes = {"hidden_size": 64, "head_dim": 32}  # the smallest for which vLLM has a CPU kernel
    folder = tiny_policy.model_folder(tmp_path_factory.mktemp("teacher") / "model", **sizes)
    model = tiny_policy.exact_model(folder, seed=5).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("teacher") / "vllm.log"
    with serving(folder, log, dtype="float32", **{"max-model-len": "64"}) as url:
        yield url


@pytest.fixture
def setting(folder):
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


def test_the_servers_likeliest_tokens_are_those_of_the_local_model(url, folder, setting):
    for top_k in (1, 5, 20):
        more = {"revision": None, "dtype": "float32", "sees_hint": False}
        local = FrozenModel(path=str(folder), top_k=top_k, **more)
        both = [one.start(setting).score(rows()) for one in (remote(url, top_k), local)]
        for served, loaded in zip(*both, strict=True):
            for name in ("logprobs", "candidate_logprobs"):
                given = (getattr(served, name), getattr(loaded, name))
                torch.testing.assert_close(*given, rtol=1e-3, atol=1e-3)
            # Two tokens of almost equal probability may be in another order.
            same = (served.candidates == loaded.candidates).float().mean()
            assert same > 0.95


def test_without_a_comparison_only_the_given_tokens_are_requested(url, setting):
    plain = replace(setting, reads_candidates=False)
    given = remote(url, 999).start(plain).score(rows())
    both = remote(url, 3).start(setting).score(rows())
    assert given[0].candidates is None
    for one, other in zip(given, both, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)


def test_too_many_candidates_are_refused_with_the_limit_that_vllm_names(url, setting):
    with pytest.raises(RunFailed, match="returns at most 20 likely tokens"):
        remote(url, 21).start(setting).score(rows())
