"""Blocking requests that control vLLM: pause it, push weights, resume it.

    all weights     pause -> start_update -> update -> finish_update(version) -> resume
    LoRA adapter    once: start_update, load_adapter; push: pause -> update -> set_version -> resume
    evaluate.py     load_adapter if the model has one; set_version, because evaluate.py never pushes

`rl/inference/client.py` has the requests that sample tokens.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from rl.inference.completion import prompt_logprobs, scoring_request
from rl.inference.replica import Replica
from rl.inference.request_body import JSONBody
from rl.runtime.failure import RunFailed

_HEALTH_TIMEOUT_S = 2.0
_POLL_S = 0.2
REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)  # answers to a wrong key
_MIN_TIMEOUT_S = 0.001  # with 0, httpx would raise ConnectError, not a timeout error


class VLLMRoutes(AbstractContextManager["VLLMRoutes"]):
    """A context manager and client for the HTTP routes that control one vLLM.

    Every request opens a new connection, because vLLM closes a connection that is idle for 5 s, and
    a training step may take longer.

    Raises:
        RunFailed: every method raises it if vLLM refuses, answers too late or cannot be reached.
    """

    def __init__(
        self, replica: Replica, *, timeout: float, limit: str = "trainer.wait_timeout"
    ) -> None:
        """`timeout`: seconds to wait for an answer; `limit`: the option that sets the timeout."""
        self.replica, self._limit, self._timeout = replica, limit, timeout
        self._deadline: float | None = None
        self._http = http_client(replica, timeout)

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @contextmanager
    def shared_timeout(self) -> Iterator[None]:
        """Apply the timeout to all requests of the block together, not to each request."""
        self._deadline = time.monotonic() + self._timeout
        try:
            yield
        finally:
            self._deadline = None

    def pause(self) -> None:
        """Pause generation. Running requests keep their key-value blocks and can continue."""
        self._post("/pause?mode=keep&clear_cache=false")

    def resume(self) -> None:
        self._post("/resume")

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Start our transfer engine (rl/weights/vllm_plugin.py) inside vLLM."""
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def start_update(self) -> None:
        """Begin a weight update. If a killed trainer left an update unfinished, finish it first."""
        if not self._try_post("/start_weight_update"):
            self._post("/finish_weight_update")
            self._post("/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        """Make vLLM load weights. `info` tells where the weights are, or contains their bytes."""
        self._post("/update_weights", {"update_info": info})

    def finish_update(self, version: int) -> None:
        """Finish the update, so that vLLM samples with the new weights as policy `version`."""
        self._post("/finish_weight_update", {"weight_version": str(version)})

    def set_version(self, version: int) -> None:
        """Make vLLM report policy `version` for each new token. This changes no weights."""
        self._post("/update_weight_version", {"new_version": str(version)})

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load the LoRA adapter from a folder into vLLM. Requests with model=`name` use it."""
        adapter = {"lora_name": name, "lora_path": str(folder)}
        if not self._try_post("/v1/load_lora_adapter", adapter):  # probably already loaded
            self._try_post("/v1/unload_lora_adapter", adapter)
            self._post("/v1/load_lora_adapter", adapter)

    def score(self, model: str, token_ids: list[int]) -> list[float]:
        """Return vLLM's logprob of each token except the first, at temperature 1."""
        body = {"model": model, **scoring_request(token_ids)}
        return prompt_logprobs(self._post("/inference/v1/generate", body), token_ids)

    def num_workers(self) -> int:
        """Return the number of vLLM's worker processes. The weights are split among them."""
        return self._post("/get_world_size?include_dp=false", method="GET")["world_size"]

    def _post(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST"
    ) -> dict[str, Any]:
        response = self._request(method, path, body)
        if response.status_code != httpx.codes.OK:
            raise RunFailed(
                f"vLLM refused `{_route(path)}`: {response.text[:500]}; see {self.replica.log}"
            )
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else {}  # the adapter routes return plain text

    def _try_post(self, path: str, body: dict[str, Any] | None = None) -> bool:
        return self._request("POST", path, body).status_code == httpx.codes.OK

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        left = self._timeout
        if self._deadline is not None:
            left = max(self._deadline - time.monotonic(), _MIN_TIMEOUT_S)
        json_body = None if body is None else JSONBody(body)
        headers = json_body and {
            "Content-Type": "application/json",
            "Content-Length": str(json_body.num_bytes),
        }
        try:
            return self._http.request(
                method, path, content=json_body, headers=headers, timeout=left
            )
        except httpx.TimeoutException as error:
            raise RunFailed(
                f"vLLM did not answer `{_route(path)}` within {self._limit}={self._timeout:g} s: "
                f"raise {self._limit}, or find the cause in {self.replica.log}"
            ) from error
        except httpx.HTTPError as error:
            raise RunFailed(
                f"vLLM cannot be reached for `{_route(path)}` ({type(error).__name__}: {error}): "
                f"find the cause in {self.replica.log}"
            ) from error


def _route(path: str) -> str:
    return path.partition("?")[0].strip("/")


def http_client(replica: Replica, timeout: float) -> httpx.Client:
    """Return an HTTP client of one vLLM that opens a new connection for each request."""
    path = replica.address.path
    fresh = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=path and str(path), limits=fresh),
        base_url=replica.address.url,
        headers=replica.headers,
        timeout=timeout,
    )


def is_healthy(replica: Replica, *, or_unusable: bool = False) -> bool:
    """Return whether vLLM answers. `or_unusable`: also if it refuses the key or is no vLLM."""
    path = replica.address.path
    if path and not path.exists():
        return False
    try:
        with http_client(replica, _HEALTH_TIMEOUT_S) as client:
            status = client.get("/health").status_code
            # A proxy may answer 5xx while vLLM starts.
            return status == httpx.codes.OK or (or_unusable and status < 500)
    except httpx.HTTPError:
        return False


def prefix_cache_counts(replica: Replica) -> tuple[float, float] | None:
    """Return (prompt tokens received, those found in vLLM's cache); None if the request fails."""
    try:
        with http_client(replica, _HEALTH_TIMEOUT_S) as client:
            text = client.get("/metrics").raise_for_status().text
    except httpx.HTTPError:
        return None
    found = re.findall(r"^vllm:prefix_cache_(queries|hits)_total\S* (\S+)$", text, re.MULTILINE)
    # Sum over the engines of vLLM, because each engine has its own counters.
    queries, hits = (
        sum(float(n) for name, n in found if name == what) for what in ("queries", "hits")
    )
    return queries, hits


def wait_until_healthy(
    replica: Replica,
    timeout: float,
    check: Callable[[], None] = lambda: None,
    began: float | None = None,
) -> None:
    """Block until vLLM is healthy. Raise RunFailed `timeout` s after `began` (time.monotonic()).

    `check` is called after each failed attempt. It raises if vLLM has ended.
    """
    deadline = (time.monotonic() if began is None else began) + timeout
    while not is_healthy(replica):
        check()
        if time.monotonic() > deadline:
            raise RunFailed(
                f"vLLM did not start within inference.startup_timeout={timeout:g} s: raise "
                f"inference.startup_timeout, or find the cause in {replica.log}"
            )
        time.sleep(_POLL_S)
