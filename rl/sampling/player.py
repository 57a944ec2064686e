"""Play a group of episodes: the policy answers through the server, the environment replies.

    example -> prompt -> server -> message -> env.reply -> next prompt -> ... -> env.score

A strategy (strategy.py) decides how many attempts are played, and which of them form the group.
An environment with `holds_conversation` writes the prompts itself and calls a Speaker at each turn.
An error of an environment (an exception, a timeout or a NaN reward) affects only the episode in
which it occurs, unless `score_group` fails. After an exception the rollout is repeated, at most
`sampler.max_retries` times. A rollout that still fails gets no reward, its error is counted, and
the other rollouts of its group are trained.
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Self

from envs import threads
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.protocol import ContextFull, Environment
from rl.config.schedules import NO_SCHEDULES, Schedules
from rl.inference.completion import Completion, RequestFailed
from rl.records import Rollout
from rl.sampling.chat import Chat, Prompt
from rl.sampling.clock import Clock
from rl.sampling.environment_errors import EnvironmentFailed, as_environment_error
from rl.sampling.finished_group import FinishedGroup
from rl.sampling.prefix import Given, Prefix, sample_turn
from rl.sampling.rewarding import with_rewards
from rl.sampling.rollout_inputs import RolloutInputs
from rl.sampling.row_builder import RowBuilder
from rl.sampling.sampler import PolicySampler, RequestSeeds
from rl.sampling.speaker import Speaker
from rl.sampling.strategy import Independent, StartedGroup, Strategy, play_strategy
from rl.sampling.watchdog import Watchdog

log = logging.getLogger(__name__)

# Result of `rewards_by_name`: name -> reward, and name -> rewards of the turns.
Scores = tuple[dict[str, float], dict[str, tuple[float, ...]]]
_Played = tuple[Rollout, list[Speaker]]  # a rollout, and the speakers of it and of its `others`


@dataclass
class Player:
    sampler: PolicySampler
    env: Environment  # may be a mixture of environments
    chat: Chat
    watchdog: Watchdog | None = None
    seed: int | None = None  # seed of the run; None: requests have no seed
    strategy: Strategy = field(default_factory=Independent)
    schedules: Schedules = NO_SCHEDULES
    policy_version: int = 0
    hinted_envs: frozenset[str] = frozenset()  # names of envs whose reference model sees hints
    _logged: set[str] = field(default_factory=set)  # errors that have been logged
    _checked: set[str] = field(default_factory=set)  # "<env> <role>" whose reward names are right
    _env_slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)  # key: env.name

    def at_version(self, version: int) -> Self:
        """Apply the schedules of `version` to `env`, and to the sampler of the returned copy."""
        self.schedules.apply(self.env, "env", version)
        options = self.schedules.options("sampler", version)
        return replace(self, sampler=replace(self.sampler, **options), policy_version=version)

    async def play_group_at(self, *group: Any) -> tuple[Rollout, ...]:
        """Play a group, given the arguments of `play_group` and the policy version."""
        return await self.at_version(group[-1]).play_group(*group[:-1])

    async def play_group(
        self, index: int, example: Example, group_size: int
    ) -> tuple[Rollout, ...]:
        """Play an example, usually `group_size` times concurrently, and return the rollouts.

        An episode has one rollout, or one for each role that spoke.

        In a single-turn environment the attempts that start together share one request, which is
        about 20 % faster than one request each. If max_tokens is large, they do not share it,
        because one slow completion could make the shared request time out.
        """
        env = self.env.environment_of(example)
        sampler = replace(self.sampler, **(env.sampling or {}))  # `env.sampling` overrides options
        with replace(self.chat, sampler=sampler).group() as chat:
            player = replace(self, sampler=sampler, chat=chat)
            return await player._play_rollouts(env, index, example, group_size)

    async def _play_rollouts(
        self, env: Environment, index: int, example: Example, group_size: int
    ) -> tuple[Rollout, ...]:
        await self.chat.check_server()
        clock = Clock(self.sampler.rollout_timeout)
        seeds = RequestSeeds(self.seed, index)
        start = RolloutInputs(env, example, clock, seeds, env.add_system_prompt)
        if env.scores_groups and self.strategy.reads_rewards:
            raise ValueError(
                f"{type(self.strategy).__name__} reads the rewards of attempts, but score_group of "
                f"env {env.name!r} computes them later: use strategy=independent"
            )
        count = self.strategy.num_first(group_size)
        openings: list[Completion] = []
        # If the first prompt or the request fails, each rollout repeats it and reports the error.
        with suppress(EnvironmentFailed, TimeoutError, RequestFailed):
            if not env.holds_conversation:
                async with clock.run():
                    prompt = start.prompt = await self._first_prompt(start)
                    if count and env.max_turns == 1 and self.chat.shares_request(prompt):
                        async with clock.hold_slots(self.chat.slots, count):
                            seed = seeds.next()
                            openings = await self.chat.generate(prompt, count, seed)
        speakers: dict[int, list[Speaker]] = {}

        async def play_one(
            example: Example,
            *,
            seed: int,
            prefix: Given | None = None,
            prefix_trains: bool = False,
            hint: str | None = None,
        ) -> Rollout:
            inputs = replace(start, clock=replace(clock), seeds=replace(seeds, rollout=seed))
            if prefix is not None:
                inputs.prefix = Prefix.of(self.chat, prefix, trains=prefix_trains)
            elif seed < len(openings) and hint is None and example is start.example:
                inputs.opening = openings[seed]
            if hint is not None or example is not start.example:
                inputs.change_example(example, hint)
            rollout, speakers[id(rollout.messages)] = await self._play_with_retries(inputs)
            return rollout

        group = StartedGroup(index, example)
        chosen = await play_strategy(self.strategy, group, play_one, group_size)
        pairs = [
            (replace(of_role, others=()), speaker)
            for rollout in chosen
            for of_role, speaker in zip(
                (rollout, *rollout.others), speakers[id(rollout.messages)], strict=True
            )
        ]
        finished = FinishedGroup(env, self.chat, pairs, self._log_once, self._checked)
        if env.scores_groups:
            finished = await finished.with_group_rewards(self.sampler.rollout_timeout)
        if env.name in self.hinted_envs:
            finished = await finished.with_hints()
        return tuple(rollout for rollout, _ in finished.played)

    async def _play_with_retries(self, start: RolloutInputs) -> _Played:
        retries = 0
        while True:
            async with self._env_slot(start.env):
                rollout, speakers = await self._play_once(start)
            for each in (rollout, *rollout.others):
                self._log_once(start.env, each.error)
            broken = rollout.stop_reason in (StopReason.ENV_ERROR, StopReason.ENGINE_ERROR)
            if not broken or retries == self.sampler.max_retries:
                return rollout, speakers
            # The retry samples a new first turn, because the failed attempt has used `opening`.
            retries += 1
            start = replace(start, opening=None, seeds=replace(start.seeds, retries=retries))

    def _log_once(self, env: Environment, error: str) -> None:
        """Log an error when it first occurs, because metrics contain only the number of errors."""
        if error and error not in self._logged and len(self._logged) < 100:
            self._logged.add(error)
            log.warning("%s: %s", env.name, error)

    def _env_slot(self, env: Environment) -> AbstractAsyncContextManager[object]:
        if env.max_concurrent is None:
            return nullcontext()
        # Training and evaluation share this dict, so that max_concurrent limits both together.
        return self._env_slots.setdefault(env.name, asyncio.Semaphore(env.max_concurrent))

    async def _play_once(self, start: RolloutInputs) -> _Played:
        env, clock = start.env, start.clock
        episode = Episode(
            start.example, [], number=start.seeds.rollout, policy_version=self.policy_version
        )
        first = Speaker(self.chat, RowBuilder(), episode, start)
        scores: list[Scores] = []
        error = ""
        try:
            async with clock.run():
                with as_environment_error(env, "teacher_messages"):  # called if there is a hint
                    episode.messages = start.prepare(start.example.messages)
                if env.holds_conversation:
                    await self._play_in_environment(env, first)
                else:
                    episode.stop_reason = await self._play_turns(start, episode, first.rows)
                scores = [await self._score(env, each.episode) for each in first.speakers]
                if len(scores) > 1 and env.scores_groups:
                    raise EnvironmentFailed(
                        "several roles spoke, which score_group does not allow: use score"
                    )
        except TimeoutError:
            episode.stop_reason = StopReason.TIMEOUT
            error = f"a rollout exceeded sampler.rollout_timeout={self.sampler.rollout_timeout:g} s"
        except EnvironmentFailed as failure:
            episode.stop_reason = StopReason.ENV_ERROR
            error = str(failure)
        except RequestFailed as failure:
            episode.stop_reason = StopReason.ENGINE_ERROR
            error = str(failure)
        finally:
            # Ignore an error in `close`, because the episode has already ended.
            with suppress(EnvironmentFailed), as_environment_error(env, "close"):
                env.close(episode)
        if error:  # an error ends the episode of every role
            for each in first.speakers:
                each.episode.stop_reason = episode.stop_reason
        played = [
            (self._build_rollout(start, speaker, score, error), speaker)
            for speaker, score in zip(first.speakers, scores or repeat(({}, {})), strict=False)
        ]
        # Put roles without a reward last, because strategies read the reward of the first rollout.
        played.sort(key=lambda pair: pair[0].reward is None)
        rollout, *others = [rollout for rollout, _ in played]
        return replace(rollout, others=tuple(others)), [speaker for _, speaker in played]

    def _build_rollout(
        self, start: RolloutInputs, speaker: Speaker, scores: Scores, error: str
    ) -> Rollout:
        env, episode, (rewards, turn_rewards) = start.env, speaker.episode, scores
        rollout = Rollout(
            rows=speaker.rows.freeze(),
            messages=episode.messages,
            reward=None,
            rewards=rewards,
            turn_rewards=turn_rewards,
            stop_reason=episode.stop_reason or StopReason.ENV_ERROR,
            turns=episode.turns,
            generation_time=start.clock.engine_time,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            error=error,
            num_untracked_tokens=speaker.rows.num_untracked_tokens,
            turn_limit=self.sampler.max_tokens,
            blocked_time=self.watchdog.pop_blocked_seconds() if self.watchdog else 0.0,
            role=episode.role,
            retries=start.seeds.retries,
        )
        # If the environment has `score_group`, FinishedGroup sets the reward later.
        if not error and not env.scores_groups:
            rollout = with_rewards(env, rollout, rewards, self._checked)
        return rollout

    async def _play_turns(
        self, start: RolloutInputs, episode: Episode, rows: RowBuilder
    ) -> StopReason:
        env, opening = start.env, start.opening
        prompt = start.prompt or await self._first_prompt(start)
        if start.prefix and start.prefix.turns[0].prompt_ids not in ([], prompt.token_ids):
            raise ValueError(
                "the prefix was sampled after a first prompt that differs from the attempt's: give "
                "play_one the example and the hint with which the prefix was sampled"
            )
        while True:
            if self.chat.max_new_tokens(prompt) <= 0:
                return StopReason.CONTEXT
            if opening is None:
                async with start.clock.hold_slots(self.chat.slots):
                    seed, turn = start.seeds.next(), episode.turns
                    opening = await sample_turn(self.chat, prompt, seed, start.prefix, turn)
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
            with as_environment_error(env, "reply"):  # next_prompt raises if the reply is malformed
                episode.messages += reply
                prompt = await self.chat.next_prompt(prompt, completion, message, reply)

    async def _play_in_environment(self, env: Environment, first: Speaker) -> None:
        try:
            with as_environment_error(env, "play"), suppress(ContextFull):
                await env.play(first.episode, first)
        finally:
            with as_environment_error(env, "play"):
                first.raise_failure()  # raise an error of `speak` even if the environment caught it
        for speaker in first.speakers:
            speaker.episode.stop_reason = speaker.episode.stop_reason or speaker.stop_reason

    async def _first_prompt(self, start: RolloutInputs) -> Prompt:
        env, example = start.env, start.example
        with as_environment_error(env, f"examples (id {example.id})"):
            return await self.chat.first_prompt(start.prepare(example.messages), env.tool_specs)

    async def _score(self, env: Environment, episode: Episode) -> Scores:
        with as_environment_error(env, "score"):
            return rewards_by_name(await threads.call(env.score, episode), episode.turns)
