"""Plays a group of episodes: the policy answers through the server, the environment replies.

    example -> prompt -> server -> message -> env.reply -> next prompt -> ... -> env.score

An environment with `holds_conversation` writes the prompts itself and calls speaker.py per turn.
An error of an environment (an exception, a timeout or a NaN reward) affects only its rollout. After
an exception the rollout is repeated, at most `sampler.max_retries` times. A rollout that still
fails gets no reward, its error is counted, and the other rollouts of its group are trained.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import (
    AbstractAsyncContextManager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from envs import threads
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.protocol import ContextFull, Environment
from rl.inference.completion import Completion, RequestFailed
from rl.records import Rollout
from rl.sampling.chat import Chat, Hints, Prompt
from rl.sampling.clock import Clock
from rl.sampling.environment_errors import EnvironmentFailed, as_environment_error
from rl.sampling.rewarding import rewarded
from rl.sampling.row_builder import RowBuilder
from rl.sampling.sampler import PolicySampler, RequestSeeds
from rl.sampling.speaker import Speaker
from rl.sampling.watchdog import Watchdog

log = logging.getLogger(__name__)

_MAX_LOGGED_ERRORS = 100
_Played = tuple[Rollout, Episode, RowBuilder]
# What an error after the episode changes in a rollout, beside its message.
_BROKEN = {"reward": None, "stop_reason": StopReason.ENV_ERROR}


@dataclass
class Player:
    """Plays the episodes of an environment, which may be a mixture.

    Attributes:
        seed: seed of the run, from which request seeds are derived; None: requests have no seed.
    """

    sampler: PolicySampler
    env: Environment
    chat: Chat
    watchdog: Watchdog | None = None
    seed: int | None = None
    hinted_envs: frozenset[str] = frozenset()  # environments whose reference model sees hints
    _logged: set[str] = field(default_factory=set)  # errors that have been logged
    _checked: set[str] = field(default_factory=set)  # environments whose reward names were checked
    # environment name -> semaphore, for environments that set max_concurrent
    _env_slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    async def play_group(
        self, index: int, example: Example, group_size: int
    ) -> tuple[Rollout, ...]:
        """Return `group_size` rollouts of one example, played concurrently.

        In a single-turn environment one request samples all rollouts, which is about 20 % faster.
        If max_tokens is large, each rollout has its own request, because one slow completion would
        make the shared request time out (`Chat.shares_request`).
        """
        env = self.env.environment_of(example)
        sampler = replace(self.sampler, **(env.sampling or {}))  # `env.sampling` overrides options
        with self.chat.with_sampler(sampler).group() as chat:
            player = replace(self, sampler=sampler, chat=chat)
            return await player._play_rollouts(env, index, example, group_size)

    async def _play_rollouts(
        self, env: Environment, index: int, example: Example, group_size: int
    ) -> tuple[Rollout, ...]:
        await self.chat.check_server()
        clock = Clock(self.sampler.rollout_timeout)
        seeds = RequestSeeds(self.seed, index)
        start = _RolloutInputs(env, example, clock, seeds)
        openings: list[Completion | None] = [None] * group_size
        # If the shared request fails, each rollout sends its own request and reports its own error.
        with suppress(EnvironmentFailed, TimeoutError, RequestFailed):
            if not env.holds_conversation:
                async with clock.running():
                    prompt = start.prompt = await self._first_prompt(env, example)
                    if env.max_turns == 1 and self.chat.shares_request(prompt):
                        async with clock.holding_slots(self.chat.slots, group_size):
                            seed = seeds.next()
                            openings = [*await self.chat.generate(prompt, group_size, seed)]
        # Each rollout gets its own copy of the clock, so that each has its own timeout.
        starts = (
            replace(start, clock=replace(clock), opening=opening, seeds=replace(seeds, rollout=i))
            for i, opening in enumerate(openings)
        )
        played = await asyncio.gather(*map(self._play_with_retries, starts))
        rollouts = tuple(rollout for rollout, *_ in played)
        if env.scores_groups:
            rollouts = await self._score_group(env, played)
        return await self._add_hints(env, rollouts, played)

    async def _add_hints(
        self, env: Environment, rollouts: tuple[Rollout, ...], played: Sequence[_Played]
    ) -> tuple[Rollout, ...]:
        """Add the hints that the reference model sees. A rollout whose hint fails has no rows."""
        if env.name not in self.hinted_envs:
            return rollouts
        for rollout, (_, episode, _) in zip(rollouts, played, strict=True):
            episode.reward = rollout.reward
        group = [e for r, (_, e, _) in zip(rollouts, played, strict=True) if not r.error]
        hints, hinted = Hints(self.chat, env, group), list[Rollout]()
        for rollout, (_, episode, rows) in zip(rollouts, played, strict=True):
            try:
                await rows.add_hints(partial(hints, episode=episode))
                changes: dict[str, Any] = {"rows": rows.freeze()}
            except (EnvironmentFailed, RequestFailed) as failure:
                self._log_once(env, error := str(failure))
                changes = {"rows": (), "error": error, **_BROKEN}
            hinted.append(replace(rollout, **changes))
        return tuple(hinted)

    async def _score_group(
        self, env: Environment, played: Sequence[_Played]
    ) -> tuple[Rollout, ...]:
        """Add the rewards of `env.score_group`. If it fails, no rollout has a reward."""
        scored = [episode for rollout, episode, _ in played if not rollout.error]
        try:
            async with Clock(self.sampler.rollout_timeout).running():
                with as_environment_error(env, "score_group"):
                    found = [*await threads.call(env.score_group, scored)] if scored else []
                    if len(found) != len(scored):
                        raise ValueError(
                            f"returned {len(found)} results for {len(scored)} episodes: return "
                            "one mapping of rewards for each"
                        )
                    results = iter([rewards_by_name(each, 0)[0] for each in found])
        except (TimeoutError, EnvironmentFailed) as failure:
            error = str(failure) or (
                f"score_group took longer than sampler.rollout_timeout="
                f"{self.sampler.rollout_timeout:g} s"
            )
            self._log_once(env, error)
            return tuple(
                rollout if rollout.error else replace(rollout, **_BROKEN, error=error)
                for rollout, *_ in played
            )
        return tuple(
            rollout
            if rollout.error
            else rewarded(env, rollout, {**rollout.rewards, **next(results)}, self._checked)
            for rollout, *_ in played
        )

    async def _play_with_retries(self, start: "_RolloutInputs") -> _Played:
        retries = 0
        while True:
            async with self._env_slot(start.env):
                rollout, episode, rows = await self._play_once(start)
            self._log_once(start.env, rollout.error)
            broken = rollout.stop_reason in (StopReason.ENV_ERROR, StopReason.ENGINE_ERROR)
            if not broken or retries == self.sampler.max_retries:
                return replace(rollout, retries=retries), episode, rows
            # With opening=None the retry samples a new first turn. The shared one has been used.
            retries += 1
            start = replace(start, opening=None, seeds=replace(start.seeds, attempt=retries))

    def _log_once(self, env: Environment, error: str) -> None:
        """Log an error when it first occurs. The metrics count errors only after a whole batch."""
        if error and error not in self._logged and len(self._logged) < _MAX_LOGGED_ERRORS:
            self._logged.add(error)
            log.warning("%s: %s", env.name, error)

    def _env_slot(self, env: Environment) -> AbstractAsyncContextManager[object]:
        if env.max_concurrent is None:
            return nullcontext()
        # Training and evaluation share this dict, so that max_concurrent limits their sum.
        return self._env_slots.setdefault(env.name, asyncio.Semaphore(env.max_concurrent))

    async def _play_once(self, start: "_RolloutInputs") -> _Played:
        env, clock = start.env, start.clock
        episode = Episode(start.example, env.opened(start.example.messages))
        rows = RowBuilder()
        rewards: dict[str, float] = {}
        turn_rewards: dict[str, tuple[float, ...]] = {}
        error = ""
        try:
            async with clock.running():
                if env.holds_conversation:
                    episode.stop_reason = await self._play_in_environment(start, episode, rows)
                else:
                    episode.stop_reason = await self._play_turns(start, episode, rows)
                rewards, turn_rewards = await self._score(env, episode)
        except TimeoutError:
            episode.stop_reason = StopReason.TIMEOUT
            error = f"took longer than sampler.rollout_timeout={self.sampler.rollout_timeout:g} s"
        except EnvironmentFailed as failure:
            episode.stop_reason = StopReason.ENV_ERROR
            error = str(failure)
        except RequestFailed as failure:
            episode.stop_reason = StopReason.ENGINE_ERROR
            error = str(failure)
        finally:
            # An error in `close` is ignored, because the reward is already known.
            with suppress(EnvironmentFailed), as_environment_error(env, "close"):
                env.close(episode)
        rollout = Rollout(
            rows=rows.freeze(),
            messages=episode.messages,
            reward=None,
            rewards=rewards,
            turn_rewards=turn_rewards,
            stop_reason=episode.stop_reason or StopReason.ENV_ERROR,
            turns=episode.turns,
            generation_time=clock.engine_time,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            error=error,
            num_untracked_tokens=rows.num_untracked_tokens,
            turn_limit=self.sampler.max_tokens,
            blocked_time=self.watchdog.pop_blocked_seconds() if self.watchdog else 0.0,
        )
        # With score_group, `_score_group` computes the reward, which may need the group's rewards.
        if not error and not env.scores_groups:
            rollout = rewarded(env, rollout, rewards, self._checked)
        return rollout, episode, rows

    async def _play_turns(
        self, start: "_RolloutInputs", episode: Episode, rows: RowBuilder
    ) -> StopReason:
        env, opening = start.env, start.opening
        prompt = start.prompt or await self._first_prompt(env, start.example)
        while True:
            if self.chat.max_new_tokens(prompt) <= 0:
                return StopReason.CONTEXT
            if opening is None:
                async with start.clock.holding_slots(self.chat.slots):
                    opening = (await self.chat.generate(prompt, 1, start.seeds.next()))[0]
            completion, opening = opening, None
            rows.add_turn(completion, prompt)
            message = self.chat.message(prompt, completion)
            episode.messages.append(message)
            episode.turns += 1
            if completion.cut_off:  # an incomplete turn is not passed to `env.reply`
                return self.chat.stop_reason(completion)
            with as_environment_error(env, "reply"):
                reply = await threads.call(env.reply, episode, message)
            if reply is None:
                return StopReason.STOP
            if episode.turns >= env.max_turns:
                return StopReason.MAX_TURNS
            with as_environment_error(env, "reply"):  # rendering a malformed reply raises
                episode.messages += reply
                prompt = await self.chat.next_prompt(prompt, completion, message, reply)

    async def _play_in_environment(
        self, start: "_RolloutInputs", episode: Episode, rows: RowBuilder
    ) -> StopReason:
        speaker = Speaker(
            *(self.chat, rows, episode, lambda: start.clock.holding_slots(self.chat.slots)),
            *(start.seeds, start.env.opened),
        )
        try:
            with as_environment_error(start.env, "play"), suppress(ContextFull):
                await start.env.play(episode, speaker)
        finally:
            speaker.raise_failure()  # raise the server's error even if the environment caught it
        return episode.stop_reason or speaker.stop_reason

    async def _first_prompt(self, env: Environment, example: Example) -> Prompt:
        with as_environment_error(env, f"examples (id {example.id})"):
            return await self.chat.first_prompt(env.opened(example.messages), env.tool_specs)

    async def _score(
        self, env: Environment, episode: Episode
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        with as_environment_error(env, "score"):
            scored = await threads.call(env.score, episode)
            return rewards_by_name(scored, episode.turns)


@dataclass
class _RolloutInputs:
    """The inputs of one rollout. The rollouts of a group may share `prompt`."""

    env: Environment
    example: Example
    clock: Clock
    seeds: RequestSeeds
    prompt: Prompt | None = None  # first prompt; None until it is rendered
    opening: Completion | None = None  # first completion, from the request that the group shared
