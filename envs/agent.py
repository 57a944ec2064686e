"""Play episodes with any agent program that talks to a chat endpoint (OpenAI API).

    command: [python, agent.py, "{prompt}"]      one process per episode, in a folder of its own
    OPENAI_BASE_URL, OPENAI_API_KEY              an endpoint on 127.0.0.1, whose model is the policy
    rewards                                      functions that read the agent's files and output

All episodes share the endpoint. Each episode has its own API key, by which the endpoint finds the
episode. The agent is not confined: it may do on this machine all that the run's user may do.
"""

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from envs.composed import Composed
from envs.episode import Episode, StopReason
from envs.messages import Message
from envs.options import PositiveInt
from envs.policy_endpoint import MODEL, PolicyEndpoint
from envs.protocol import ContextFull, PolicyTurn, Speak
from envs.rewards import answers_of, exact

_PROMPT = "{prompt}"
_KEPT_BYTES = 1 << 16  # maximum bytes read from the end of the output, or from the start of a file
_KILL_ROUNDS = 250  # each round takes 0.02 s; the kernel may need 5 s to end a process
_INHERITED = ("PATH", "LANG", "TZ")  # the agent inherits only these; other variables may be secret


class Agent(Composed):
    """The user's program, the agent, plays the episodes. conf/env/agent.yaml explains the options.

    For rewards, `episode.memory` has `folder` (the Path in which the agent worked), `status` (its
    exit status, negative if a signal ended it) and `output` (the end of what it printed).
    """

    holds_conversation = True

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] other options have no effect
        self,
        *,
        command: Sequence[str],
        variables: Mapping[str, str],
        max_requests: PositiveInt,
        system_prompt: str | None = None,
    ) -> None:
        super().configure(system_prompt=system_prompt)
        if self.tools:
            raise ValueError("tools are set, but the agent has its own: remove `tools`")
        if not any(_PROMPT in argument for argument in command):
            raise ValueError(
                f"command={list(command)} has no {_PROMPT}: write {_PROMPT} where the task belongs"
            )
        # Make the command's paths absolute, because each episode has its own working folder.
        self._command = [str(Path(a).resolve()) if os.path.isfile(a) else a for a in command]
        self._variables, self._max_requests = dict(variables), max_requests
        self._endpoint, self._servers = PolicyEndpoint(), AsyncExitStack()
        self._url: asyncio.Future[str] | None = None

    def check_machine(self) -> None:
        super().check_machine()
        if shutil.which(name := self._command[0]) is None:
            raise ValueError(
                f"command starts {name!r}, which is not installed: install it or correct its name"
            )

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Run the command until it ends, and answer its requests with turns of the policy."""
        key = secrets.token_urlsafe(24)
        folder = episode.memory["folder"] = Path(tempfile.mkdtemp(prefix="offbyone-agent-"))

        async def get_turn(messages: list[Message], tools: Any) -> PolicyTurn:
            if episode.turns >= self._max_requests:
                episode.stop_reason = StopReason.MAX_TURNS
                await _kill_all(key)
                raise ContextFull(f"the agent made {episode.turns} requests: raise max_requests")
            return await speak(messages, tools)

        task = str(episode.example.messages[-1].get("content") or "")
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        endpoint = {"OPENAI_BASE_URL": await self._endpoint_url(), "OPENAI_API_KEY": key}
        self._endpoint.get_turn_by_key[key] = get_turn
        with tempfile.TemporaryFile() as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *[argument.replace(_PROMPT, task) for argument in self._command],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    env=inherited
                    | {"HOME": str(folder), "OPENAI_MODEL": MODEL, **self._variables, **endpoint},
                )
                status = episode.memory["status"] = await process.wait()
            finally:
                del self._endpoint.get_turn_by_key[key]
                await _kill_all(key)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT_BYTES))
            text = episode.memory["output"] = output.read().decode(errors="replace")
        if not episode.turns:
            raise RuntimeError(
                f"the agent ended with status {status} before it asked the policy: {text[-200:]}"
            )

    def close(self, episode: Episode) -> None:
        super().close(episode)
        shutil.rmtree(episode.memory.get("folder", ""), ignore_errors=True)

    async def _endpoint_url(self) -> str:
        if self._url is None:
            serving = self._servers.enter_async_context(self._endpoint.serving())
            self._url = asyncio.ensure_future(serving)
        # Without the shield, a cancelled episode would cancel the start for all episodes.
        return await asyncio.shield(self._url)


async def _kill_all(key: str) -> None:
    """Kill the processes with an episode's `key` in their environment. Give up after 5 s."""
    for _ in range(_KILL_ROUNDS):
        alive = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if key.encode() in path.read_bytes():
                    alive = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        if not alive:
            return
        await asyncio.sleep(0.02)


async def succeeded(episode: Episode) -> float:
    """Return 1 if the agent ended with status 0, else 0."""
    return float(episode.memory["status"] == 0)


async def wrote(episode: Episode, *, path: str) -> float:
    """Return 1 if the text of the agent's file `path` equals an answer, as in `exact`, else 0."""
    file: Path = episode.memory["folder"] / path
    if not file.is_file():
        return exact("", answers_of(episode))
    with file.open("rb") as opened:
        return exact(opened.read(_KEPT_BYTES).decode(errors="replace"), answers_of(episode))
