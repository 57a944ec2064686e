"""Plays a group of episodes: the policy answers through the engine, the environment replies.

Whatever an environment does wrong (raise, hang, return NaN) costs that rollout: it gets no
reward, is counted by cause, and the rest of its group goes on.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from renderers import Renderer

from envs.protocol import Environment, Episode, Example, Message, StopReason
from rl.blame import EnvironmentFailed, blaming
from rl.client import Client, Completion
from rl.records import Rollout
from rl.rows import Rows


@dataclass(frozen=True, kw_only=True)
class PolicySampler:
    """Rollouts of the policy in training (conf/sampler). Knobs are explained in async.yaml."""

    uses_engine: ClassVar[bool] = True
    max_staleness: int
    max_concurrent: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    rollout_timeout: float
    allow_biased_ratio: bool

    def sampling(self, renderer: Renderer) -> dict[str, object]:
        """Return vLLM's sampling parameters, the turn's token limit excepted."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop_token_ids": renderer.get_stop_token_ids(),
        }


@dataclass
class Player:
    """What it takes to play an episode; one per environment.

    Attributes:
        version: returns the newest policy version known to be live.

    """

    sampler: PolicySampler
    env: Environment
    renderer: Renderer
    client: Client
    max_seq_len: int
    version: Callable[[], int]

    async def play_group(
        self,
        index: int,  # noqa: ARG002 the engine draws at random
        example: Example,
        group_size: int,
    ) -> tuple[Rollout, ...]:
        """Return `group_size` rollouts of one example, played concurrently.

        In a single-turn environment all share one request: the prompt is the same and the engine
        is some 20 % faster that way.
        """
        clock = _Clock(asyncio.get_running_loop().time() + self.sampler.rollout_timeout)
        prompt: list[int] = []
        openings: list[Completion | None] = [None] * group_size
        # A broken example, or no time left: each rollout finds that out for itself.
        with suppress(EnvironmentFailed, TimeoutError):
            prompt = self._opening(example)
            if self.env.max_turns == 1 and self._room(prompt) > 0:
                async with asyncio.timeout_at(clock.deadline):
                    with clock.waiting():
                        openings = [*await self._generate(prompt, group_size)]
        plays = (self._play(example, prompt, o, replace(clock)) for o in openings)
        return tuple(await asyncio.gather(*plays))

    async def _play(
        self, example: Example, prompt: list[int], opening: Completion | None, clock: "_Clock"
    ) -> Rollout:
        episode = Episode(example=example, messages=list(example.messages))
        rows = Rows()
        rewards: dict[str, float] = {}
        error = ""
        try:
            async with asyncio.timeout_at(clock.deadline):
                prompt = prompt or self._opening(example)
                episode.stop_reason = await self._converse(episode, rows, prompt, opening, clock)
                rewards = await self._score(episode)
        except TimeoutError:
            episode.stop_reason = StopReason.TIMEOUT
            error = f"took longer than sampler.rollout_timeout={self.sampler.rollout_timeout:g} s"
        except EnvironmentFailed as failure:
            episode.stop_reason = StopReason.ENV_ERROR
            error = str(failure)
        reward = self._reward(rewards) if not error else None
        if reward is None and not error:
            broken = [name for name, value in rewards.items() if not math.isfinite(value)]
            error = f"{type(self.env).__name__}.score returned NaN or infinity for {broken}"
        return Rollout(
            sequences=rows.freeze(),
            messages=episode.messages,
            reward=reward,
            rewards=rewards,
            stop_reason=episode.stop_reason or StopReason.ENV_ERROR,
            turns=episode.turns,
            generation_time=clock.seconds,
            error=error,
        )

    async def _converse(
        self,
        episode: Episode,
        rows: Rows,
        prompt: list[int],
        opening: Completion | None,
        clock: "_Clock",
    ) -> StopReason:
        while True:
            if self._room(prompt) <= 0:
                return StopReason.CONTEXT
            rows.prompt(prompt)
            if opening is None:
                with clock.waiting():
                    opening = (await self._generate(prompt, 1))[0]
            done, opening = opening, None
            rows.completion(done.token_ids, done.logprobs, done.versions)
            message = self._parse(done)
            episode.messages.append(message)
            episode.turns += 1
            if done.cut_off:
                full = len(prompt) + len(done.token_ids) >= self.max_seq_len
                return StopReason.CONTEXT if full else StopReason.MAX_TOKENS
            with blaming(self.env, "reply"):
                reply = await self.env.reply(episode, message)
            if reply is None:
                return StopReason.STOP
            if episode.turns >= self.env.max_turns:
                return StopReason.MAX_TURNS
            with blaming(self.env, "reply"):  # its messages may be malformed
                episode.messages += reply
                prompt = self._next_prompt(episode, prompt, done, reply)

    def _opening(self, example: Example) -> list[int]:
        with blaming(self.env, f"examples (id {example.id})"):
            return render(self.renderer, example.messages)

    def _next_prompt(
        self, episode: Episode, prompt: list[int], done: Completion, reply: list[Message]
    ) -> list[int]:
        turn = cast("list[Any]", reply)  # as in `render`
        bridged = self.renderer.bridge_to_next_turn(prompt, done.token_ids, turn)
        if bridged is not None:
            return bridged.token_ids
        return render(self.renderer, episode.messages)

    def _parse(self, done: Completion) -> Message:
        parsed = self.renderer.parse_response(done.token_ids)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        return message

    def _room(self, prompt: list[int]) -> int:
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt))

    async def _generate(self, prompt: list[int], n: int) -> list[Completion]:
        sampling = {**self.sampler.sampling(self.renderer), "max_tokens": self._room(prompt)}
        return await self.client.generate(prompt, sampling, n=n, version=self.version())

    async def _score(self, episode: Episode) -> dict[str, float]:
        with blaming(self.env, "score"):
            scored = await self.env.score(episode)
            return {name: float(value) for name, value in scored.items()}

    def _reward(self, rewards: dict[str, float]) -> float | None:
        total = sum(w * rewards.get(name, 0.0) for name, w in self.env.reward_weights.items())
        return total if math.isfinite(total) else None


@dataclass
class _Clock:
    """When a rollout must be done, and how long it has waited for the engine."""

    deadline: float  # in the loop's time
    seconds: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


def render(renderer: Renderer, messages: list[Message]) -> list[int]:
    """Return the prompt ids. Our messages are plain dicts, which `renderers` types more tightly."""
    return renderer.render_ids(cast("list[Any]", messages), add_generation_prompt=True)
