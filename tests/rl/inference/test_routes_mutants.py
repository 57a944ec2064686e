"""What is posted to vLLM, to the letter, and what is read out of a score."""

import pytest

from rl.inference.routes import VLLMRoutes
from tests.support.listening import PostHandler, listening


class Answers(PostHandler):
    """Notes each path; scores every token by its own number."""

    def answer(self, body):
        self.server.paths.append(self.path)
        tokens = body.get("token_ids", [])[1:]
        scores = [None, *({str(t): {"logprob": -t / 10}, "9": {"logprob": -7.0}} for t in tokens)]
        return {"prompt_logprobs": scores}


@pytest.fixture
def vllm(tmp_path):
    with listening(tmp_path / "s", Answers) as server:
        server.paths = []
        with VLLMRoutes(tmp_path / "s", timeout=5.0) as routes:
            yield routes, server.paths


def test_a_pause_keeps_running_requests_and_their_cache(vllm):
    routes, paths = vllm
    routes.pause()
    routes.resume()
    assert paths == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_a_score_is_one_logprob_for_each_token_but_the_first_and_is_the_token_s_own(vllm):
    routes, _ = vllm
    assert routes.score("policy", [4, 2, 3]) == [-0.2, -0.3]
