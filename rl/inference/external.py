"""External vLLM servers. A run sends requests and weights to them but never starts or stops them.

The user starts each server with serve_external.py, which enables vLLM's routes for token ids,
pauses and weights.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import httpx
from tokenizers import Tokenizer

from rl.config.nodes import replica_names
from rl.config.ranges import PositiveFloat
from rl.inference.replica import Replica
from rl.inference.routes import REFUSALS, http_client
from rl.runtime.network import Address

_TIMEOUT_S = 10.0
# Tokenizers that split this text into the same tokens are assumed to be equal.
_SAMPLE_TEXT = "Reverse 12 words, then say: naïve {x} == 3.50!\n"
_REQUIRED_ROUTES = ("/inference/v1/generate", "/init_weight_transfer_engine")
_REMEDY = "start it with `python -m rl.inference.serve_external <run folder> <URL>`"


@dataclass(frozen=True, kw_only=True)
class ExternalServers:
    """The options of conf/inference/external.yaml."""

    is_external: ClassVar[bool] = True

    urls: list[str]
    api_key_variable: str | None
    startup_timeout: PositiveFloat

    def __post_init__(self) -> None:
        self.servers()  # raises ValueError for a wrong URL or a missing key, before the run starts

    def servers(self) -> list[Replica]:
        addresses = [address_of(url) for url in self.urls]
        if not addresses or len(set(addresses)) < len(addresses):
            raise ValueError(f"inference.urls={self.urls}: write at least one URL, and each once")
        key = os.environ.get(self.api_key_variable) if self.api_key_variable else None
        if self.api_key_variable and not key:
            raise ValueError(
                f"inference.api_key_variable={self.api_key_variable} names a variable that is not "
                "set: export it with the servers' key, or set null if the servers require no key"
            )
        names = replica_names(len(addresses))
        return [Replica(n, address, key=key) for n, address in zip(names, addresses, strict=True)]


def address_of(url: str) -> Address:
    try:
        return Address.parse(re.sub("^http:", "tcp:", url.removesuffix("/"), flags=re.IGNORECASE))
    except ValueError as error:
        raise ValueError(
            f"inference.urls contains {url}, which is not the address of a vLLM: write "
            "http://host:port, without a path, or unix:/path/to/socket"
        ) from error


def why_unusable(replica: Replica, model: Path, max_seq_len: int) -> str | None:
    """Return why a running server cannot serve the model in folder `model`, or None if it can."""
    try:
        with http_client(replica, _TIMEOUT_S) as http:
            return _why_unusable(http, model, max_seq_len)
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedy = f"correct inference.urls if another program answers there, or {_REMEDY}"
        return f"cannot be used as a vLLM ({reason}): {remedy}"


def _why_unusable(http: httpx.Client, model: Path, max_seq_len: int) -> str | None:
    models = http.get("/v1/models")
    if models.status_code in REFUSALS:
        return "refuses the key: set inference.api_key_variable to the variable with the right key"
    served = {entry["id"]: entry for entry in models.raise_for_status().json()["data"]}
    if "policy" not in served:
        return f"serves {', '.join(served)}, but no model named `policy`: {_REMEDY}"
    longest = served["policy"]["max_model_len"]
    if longest < max_seq_len:
        return (
            f"accepts {longest} tokens, fewer than max_seq_len={max_seq_len}: start it with "
            f"--max-model-len {max_seq_len}, or set max_seq_len={longest}"
        )
    for route in _REQUIRED_ROUTES:
        # The required routes accept only POST, so GET changes nothing. A missing route answers 404.
        if http.get(route).status_code == httpx.codes.NOT_FOUND:
            return f"has no route {route}: {_REMEDY}"
    body = {"model": "policy", "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    theirs = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if theirs != tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False).ids:
        return f"has another tokenizer than {model}: {_REMEDY}"
    return None
