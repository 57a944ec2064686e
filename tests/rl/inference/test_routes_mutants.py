"""What is posted to vLLM, to the letter, and what is read out of a score."""

import json
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer

import pytest

from rl.inference.routes import VLLMRoutes


class Answers(BaseHTTPRequestHandler):
    """Notes each path; scores every token by its own number."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        self.server.paths.append(self.path)
        tokens = body.get("token_ids", [])[1:]
        scores = [None, *({str(t): {"logprob": -t / 10}, "9": {"logprob": -7.0}} for t in tokens)]
        answer = json.dumps({"prompt_logprobs": scores}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format, *args):
        pass

    def address_string(self):
        return "a socket"


@pytest.fixture
def vllm(tmp_path):
    with UnixStreamServer(str(tmp_path / "s"), Answers) as server:
        server.paths = []
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        with VLLMRoutes(tmp_path / "s", timeout=5.0) as routes:
            yield routes, server.paths
        server.shutdown()


def test_a_pause_keeps_running_requests_and_their_cache(vllm):
    routes, paths = vllm
    routes.pause()
    routes.resume()
    assert paths == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_a_score_is_one_logprob_for_each_token_but_the_first_and_is_the_token_s_own(vllm):
    routes, _ = vllm
    assert routes.score("policy", [4, 2, 3]) == [-0.2, -0.3]
