"""Call a run's components with made-up values (dry call) in a child process while vLLM starts.

    with DryCall([config]) as dry_call:      the child starts, unless the result is in the cache
        ...                                  vLLM starts
        learned = dry_call.learned()         waits for the child; may raise ConfigError

The child imports torch, because the supervisor must not. A cached result is valid until one of its
`own_files` (learn.py) changes. A result is not cached if the environment's examples could not be
read, because the child then did not check the example order.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from envs.loading import cache_folder
from rl.config.check import check_learned
from rl.config.learned import Learned
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError
from rl.runtime.child import last_lines, python_module
from rl.runtime.files import write_atomically

_INPUT_KEYS = (
    *("loss", "correction", "kl", "critic", "advantage", "aggregation", "truncation", "reward"),
    *("batch_credit", "buffer", "order", "strategy", "env", "client"),
    *("logger", "optim", "reference"),
    *("batch_size", "group_size", "max_seq_len", "updates_per_batch"),
)
LIMIT_S = 600.0  # DryCall kills the child after this many seconds without a new answer
Answer = Mapping[str, Any]
_CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONBREAKPOINT": "0"}


class DryCall:
    """The dry calls of some configurations. One child makes all calls that are not cached."""

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        self._full_configs = [split_schedules(config) for config in configs]
        self._configs = [_inputs(config) for config in self._full_configs]
        self._answers: list[Answer | None] = [_cached_answer(config) for config in self._configs]
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="offbyone-check-")

    def __enter__(self) -> Self:
        if uncached := self._uncached_indices():
            with self._path("asked").open("w+b") as asked, self._path("log").open("wb") as log:
                asked.write(pickle.dumps([self._configs[i] for i in uncached]))
                asked.seek(0)
                self._child = subprocess.Popen(
                    python_module("rl.dry_call.learn", str(self._path("answer"))),
                    stdin=asked,
                    stdout=log,
                    stderr=log,
                    # Use one thread and no GPU, because vLLM starts at the same time. Ignore
                    # breakpoint(), which is meant for the trainer (trainer.debug).
                    env={**os.environ, **_CHILD_ENVIRONMENT},
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _uncached_indices(self) -> list[int]:
        return [i for i, answer in enumerate(self._answers) if answer is None]

    def learned(self, index: int = 0) -> Learned:
        """Return the facts about configuration `index`; raise ConfigError if it has problems."""
        if uncached := self._uncached_indices():
            self._read_answers(uncached)
        answer = self._answers[index]
        assert answer is not None
        if "problems" in answer:
            raise ConfigError(answer["problems"])
        learned = Learned(**answer["learned"])
        check_learned(self._full_configs[index], learned)
        return learned

    def files(self, index: int = 0) -> list[str]:
        """Return the child's `own_files` (learn.py); raise ConfigError if there are problems."""
        self.learned(index)
        return (self._answers[index] or {})["files"]

    def _read_answers(self, uncached: Sequence[int]) -> None:
        assert self._child is not None
        answers, files, end = list[Answer](), list[str](), ""
        while not end:
            num_before = len(answers)
            with suppress(subprocess.TimeoutExpired):
                end = f"ended with status {self._child.wait(LIMIT_S)}"
            with suppress(OSError, ValueError):  # raised if there is no answer yet
                answers, files = json.loads(self._path("answer").read_text())
            # Kill the child, because its own timer (learn.py) cannot interrupt native code.
            if not end and len(answers) == num_before:
                self._child.kill()
                self._child.wait()
                end = f"was ended after {LIMIT_S:g} s: make the imported or called code faster"
        problem = f"the dry call {end}. The end of its output:\n{last_lines(self._path('log'), 5)}"
        later = "not checked, because the dry call of an earlier configuration ended early"
        answers += [{"problems": [text]} for text in (problem, *[later] * len(uncached))]
        for index, answer in zip(uncached, answers, strict=False):
            self._answers[index] = {**answer, "files": files}
            if "learned" in answer and answer["read_env"]:
                _cache_answer(self._configs[index], answer["learned"], files)


def _inputs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the options that affect a dry call, so that all seeds share a cached result."""
    sampler = {"max_staleness": config["sampler"].get("max_staleness")}
    return {**{key: config[key] for key in _INPUT_KEYS}, "sampler": sampler}


def _cache_file(config: Mapping[str, Any]) -> Path:
    where = [sys.executable, sys.version, os.getcwd(), os.environ.get("PYTHONPATH", "")]
    text = repr([config, where, version("torch"), str(Path(__file__))])
    return cache_folder() / "dry_calls" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _file_stamp(file: str) -> list[int]:
    status = os.stat(file)
    return [status.st_mtime_ns, status.st_size, status.st_ino]


def _cached_answer(config: Mapping[str, Any]) -> Answer | None:
    # An answer cached by another version of offbyone may have other keys, which raises TypeError.
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(_cache_file(config).read_text())
        if all(_file_stamp(file) == then for file, then in kept["files"].items()):
            Learned(**kept["learned"])
            return {"learned": kept["learned"], "files": list(kept["files"])}
    return None


def _cache_answer(config: Mapping[str, Any], learned: Answer, files: Sequence[str]) -> None:
    path = _cache_file(config)
    with suppress(OSError):
        content = {"learned": learned, "files": {file: _file_stamp(file) for file in files}}
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, json.dumps(content))
