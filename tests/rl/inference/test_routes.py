"""What is posted to vLLM, to the letter and in pieces, and what is read out of a score."""

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl.inference.request_body import _PIECE_BYTES, JSONBody
from rl.inference.routes import VLLMRoutes, is_healthy, prefix_cache_counts
from rl.runtime.failure import RunFailed
from tests.support.listening import PostHandler, listening
from tests.support.replicas import replica_at


@contextmanager
def answering(folder: Path, answer: Callable[[list[Any], str, Any], Any]) -> Iterator[list[Any]]:
    """Answer posts with `answer(noted, path, body)` until the block ends; yield what it notes."""
    noted = []

    class Answers(PostHandler):
        def answer(self, body):
            return answer(noted, self.path, body)

    with listening(folder / "s", Answers):
        yield noted


def routes_to(folder: Path, timeout: float = 5.0) -> VLLMRoutes:
    return VLLMRoutes(replica_at(folder / "s"), timeout=timeout)


def test_a_score_is_one_logprob_for_each_token_but_the_first_and_is_the_token_s_own(tmp_path):
    def answer(noted, path, body):
        tokens = body["token_ids"][1:]
        scores = ({str(t): {"logprob": -t / 10}, "9": {"logprob": -7.0}} for t in tokens)
        return {"prompt_logprobs": [None, *scores]}

    with answering(tmp_path, answer), routes_to(tmp_path) as routes:
        assert routes.score("policy", [4, 2, 3]) == [-0.2, -0.3]


def test_the_counters_of_the_prefix_cache_are_unknown_if_vllm_refuses(tmp_path):
    def answer(noted, path, body):
        noted.append(path)
        if len(noted) > 1:
            raise RuntimeError("not now")
        counts = ("queries_total{0} 8", "queries_total{1} 4", "hits_total{0} 6", "hits_total{1} 1")
        return "".join(f"vllm:prefix_cache_{count}\n" for count in counts).encode()

    with answering(tmp_path, answer):
        replica = replica_at(tmp_path / "s")
        assert prefix_cache_counts(replica) == (12.0, 7.0)
        assert prefix_cache_counts(replica) is None
        assert not is_healthy(replica)
        refused = pytest.raises(RunFailed, match=r"vLLM refused `get_world_size`: .*not now")
        with routes_to(tmp_path) as routes, refused:
            routes.num_workers()


def test_an_adapter_replaces_one_of_the_same_name(tmp_path):
    def answer(noted, path, body):
        noted.append((path, body["lora_name"], body["lora_path"]))
        if len(noted) == 1:  # an earlier trainer has loaded an adapter
            raise RuntimeError("the adapter has already been loaded")
        return b"Success"

    with answering(tmp_path, answer) as noted, routes_to(tmp_path) as routes:
        routes.load_adapter("mine", Path("/a"))
    verbs = ("load", "unload", "load")
    assert noted == [(f"/v1/{verb}_lora_adapter", "mine", "/a") for verb in verbs]


def test_requests_that_belong_together_share_one_time_limit(tmp_path):
    def answer(noted, path, body):
        noted.append(path)
        time.sleep(0.2)
        return {}

    def resume(times: int) -> None:
        for _ in range(times):
            vllm.resume()

    late = pytest.raises(RunFailed, match=r"`\w+` within trainer.wait_timeout=0.5 s")
    with answering(tmp_path, answer) as noted, routes_to(tmp_path, 0.5) as vllm:
        resume(4)  # each has its own
        with late, vllm.shared_timeout():
            resume(4)
        assert 5 <= len(noted) <= 7
        resume(1)  # and the next one has its own again


@pytest.mark.parametrize("size", [0, 1, 3, _PIECE_BYTES, 2 * _PIECE_BYTES + 1])
def test_bytes_become_base64_text_and_everything_else_is_json(size):
    value = bytes(range(251)) * (size // 251 + 1)
    content = {"a": [1, "ü"], "b": {"in": value[:size]}, "c": b"x", "d": None}
    body = JSONBody(content)
    joined = b"".join(body)
    assert len(joined) == body.num_bytes
    encoded = {"b": {"in": b64encode(value[:size]).decode()}, "c": b64encode(b"x").decode()}
    assert json.loads(joined) == content | encoded
    assert b"".join(body) == joined  # a redirected request is sent again
