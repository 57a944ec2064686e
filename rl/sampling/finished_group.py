"""Rewards and hints that need all episodes of a group: `score_group` and `teacher_messages`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from envs import threads
from envs.episode import Episode, StopReason, rewards_by_name
from envs.protocol import Environment
from rl.inference.completion import RequestFailed
from rl.records import Rollout
from rl.sampling.chat import Chat, Prompt
from rl.sampling.clock import Clock
from rl.sampling.environment_errors import EnvironmentFailed, as_environment_error
from rl.sampling.rewarding import with_rewards
from rl.sampling.speaker import Speaker

_BROKEN = {"reward": None, "stop_reason": StopReason.ENV_ERROR}  # fields of a rollout with an error


@dataclass
class FinishedGroup:
    """The rollouts of a group, each with the speaker that has its episode and rows."""

    env: Environment
    chat: Chat
    played: Sequence[tuple[Rollout, Speaker]]
    log_error: Callable[[Environment, str], None]
    checked: set[str]  # environments and roles whose reward names have been checked

    async def with_group_rewards(self, timeout: float) -> "FinishedGroup":
        """Return the group with rewards of `score_group`, or without rewards if the call fails."""
        env = self.env
        episodes = [speaker.episode for rollout, speaker in self.played if not rollout.error]
        try:
            async with Clock(timeout).run():
                with as_environment_error(env, "score_group"):
                    scores = [*await threads.call(env.score_group, episodes)] if episodes else []
                    if len(scores) != len(episodes):
                        raise ValueError(
                            f"score_group returned {len(scores)} results for {len(episodes)} "
                            "episodes: return one mapping of rewards for each"
                        )
                    results = iter([rewards_by_name(each, 0)[0] for each in scores])
        except (TimeoutError, EnvironmentFailed) as failure:
            late = f"score_group took longer than sampler.rollout_timeout={timeout:g} s"
            error = str(failure) or late
            return self._with_rollouts(
                rollout if rollout.error else replace(rollout, **_BROKEN, error=error)
                for rollout, _ in self.played
            )
        return self._with_rollouts(
            rollout
            if rollout.error
            else with_rewards(env, rollout, {**rollout.rewards, **next(results)}, self.checked)
            for rollout, _ in self.played
        )

    async def with_hints(self) -> "FinishedGroup":
        """Return the group with hints in its rows. A rollout whose hint fails gets no rows."""
        for rollout, speaker in self.played:
            speaker.episode.reward = rollout.reward
        group = [speaker.episode for rollout, speaker in self.played if not rollout.error]
        newest: tuple[object, list[int]] = (None, [])  # cached, because hints are often equal

        async def render_hint(prompt: Prompt, episode: Episode) -> list[int]:
            nonlocal newest
            arguments = episode.example, list(prompt.messages), episode, group
            with as_environment_error(self.env, "teacher_messages"):
                messages = self.env.teacher_messages(*arguments)
                if newest[0] != (messages, prompt.tools):
                    rendered = await self.chat.first_prompt(messages, prompt.tools)
                    newest = (messages, prompt.tools), rendered.token_ids
            return newest[1]

        hinted: list[Rollout] = []
        for rollout, speaker in self.played:
            try:
                # If `prepare` is another function, the prompt already has a hint, so add none.
                if speaker.inputs.prepare == self.env.add_system_prompt:
                    await speaker.rows.add_hints(partial(render_hint, episode=speaker.episode))
                changes: dict[str, Any] = {"rows": speaker.rows.freeze()}
            except (EnvironmentFailed, RequestFailed) as failure:
                changes = {"rows": (), "error": str(failure), **_BROKEN}
            hinted.append(replace(rollout, **changes))
        return self._with_rollouts(hinted)

    def _with_rollouts(self, rollouts: Any) -> "FinishedGroup":
        speakers = (speaker for _, speaker in self.played)
        group = replace(self, played=list(zip(rollouts, speakers, strict=True)))
        for rollout, _ in group.played:
            self.log_error(self.env, rollout.error)
        return group
