"""Where a part of a run listens: a Unix socket where both ends share a host, else a TCP port."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    """`path` of a Unix socket, or `host` and `port`; as text unix:/path or tcp://host:port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that a text names.

        Raises:
            ValueError: it names none.

        """
        kind, _, rest = text.partition(":")
        if kind == "unix" and Path(rest).is_absolute():
            return cls(path=Path(rest))
        parts = urlsplit(text)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None  # not a number, or one that no port has
        if kind != "tcp" or not host or not port or parts.path:
            raise ValueError(f"{text} is no address: write unix:/path or tcp://host:port")
        return cls(host=host, port=port)

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp://{self._authority}"

    @property
    def url(self) -> str:
        """What its HTTP routes begin with; a Unix socket has no name of its own."""
        return "http://vllm" if self.path else f"http://{self._authority}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """Return a blocking socket to whoever listens; OSError where nobody does."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.settimeout(timeout)
            opened.connect(str(self.path))
        except OSError:
            opened.close()
            raise
        return opened
