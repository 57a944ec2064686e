"""vLLM servers that somebody else started: asked and pushed to by URL, watched, never ended.

They must be vLLM as we start it, which serve_external.py does by hand: with our plugin, which takes
the weights, and with the routes that pause and that report versions.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
from tokenizers import Tokenizer

from rl.inference.replica import Replica, replica_names
from rl.inference.routes import http_client
from rl.run.address import Address

_LOOK_S = 10.0
_TEXT = "Reverse 12 words, then say: naïve {x} == 3.50!\n"  # tokenizers differ in where they cut it
_NEEDED = ("/inference/v1/generate", "/init_weight_transfer_engine")
_AS_WE_DO = "start it as `python -m rl.inference.serve_external <run folder> <URL>` does"


@dataclass(frozen=True, kw_only=True)
class ExternalServers:
    """conf/inference/external.yaml.

    Attributes:
        urls: of the servers, http://host:port or unix:/path.
        api_key_variable: environment variable that holds what they ask for; null: they ask for
            nothing.
        startup_timeout: seconds until each must answer.

    """

    is_external: ClassVar[bool] = True

    urls: list[str]
    api_key_variable: str | None
    startup_timeout: float

    def __post_init__(self) -> None:
        self.servers()  # what is no address is refused before anything starts

    def servers(self) -> list[Replica]:
        """Return where they are.

        Raises:
            ValueError: a URL is none, two are the same, or the variable of the key is not set.

        """
        addresses = [address_of(url) for url in self.urls]
        if not addresses or len(set(addresses)) < len(addresses):
            raise ValueError("inference.urls must name one server or more, each of them once")
        key = os.environ.get(self.api_key_variable) if self.api_key_variable else None
        if self.api_key_variable and not key:
            raise ValueError(
                f"inference.api_key_variable={self.api_key_variable} is not set: export it with "
                "the key of the servers, or use null where they ask for none"
            )
        names = replica_names(len(addresses))
        return [Replica(n, address, key=key) for n, address in zip(names, addresses, strict=True)]


def address_of(url: str) -> Address:
    """Return the address of a server; ValueError where it is none."""
    try:
        if url.startswith("unix:"):
            return Address.parse(url)
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.path in ("", "/"):
            return Address.parse(f"tcp://{parts.netloc}")
    except ValueError:
        pass
    raise ValueError(
        f"inference.urls: {url} is no address of a vLLM: write http://host:port, without a path, "
        "or unix:/path/to/socket"
    )


def unfit(replica: Replica, model: Path, max_seq_len: int) -> str | None:
    """Return why a server that answers cannot be used with the model in a folder, None if it can.

    Its weights do not matter, for they are pushed; the model's form is for vLLM to refuse.
    """
    try:
        with http_client(replica, _LOOK_S) as http:
            return _unfit(http, model, max_seq_len)
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        return f"is no vLLM that can be used ({type(error).__name__}: {error}): {_AS_WE_DO}"


def _unfit(http: httpx.Client, model: Path, max_seq_len: int) -> str | None:
    known = http.get("/v1/models")
    if known.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return "refuses the key: set inference.api_key_variable to the variable that holds its key"
    served = {entry["id"]: entry for entry in known.raise_for_status().json()["data"]}
    if "policy" not in served:
        return f"serves {', '.join(served)} and nothing under the name `policy`: {_AS_WE_DO}"
    longest = served["policy"]["max_model_len"]
    if longest < max_seq_len:
        return (
            f"takes {longest} tokens, fewer than max_seq_len={max_seq_len}: start it with a larger "
            "--max-model-len, or lower max_seq_len"
        )
    for route in _NEEDED:
        # A route that is there takes posts alone; what is said of a get changes nothing.
        if http.get(route).status_code == httpx.codes.NOT_FOUND:
            return f"has no route {route}: {_AS_WE_DO}"
    body = {"model": "policy", "prompt": _TEXT, "add_special_tokens": False}
    theirs = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    if theirs != tokenizer.encode(_TEXT, add_special_tokens=False).ids:
        return f"has another tokenizer than {model}: start it with that model"
    return None
