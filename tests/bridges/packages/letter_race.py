"""A taskset whose environment has a writer, who trains and runs twice, a rival and a judge."""

import verifiers.v1 as vf
from letter_tasks import LetterTaskset

__all__ = ["LetterRaceTaskset", "RaceEnv"]

AGENT = vf.AgentConfig(harness={"id": "letter-tasks"})


class LetterRaceTaskset(LetterTaskset):
    pass


class RaceConfig(vf.EnvConfig):
    writer: vf.AgentConfig = AGENT
    rival: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "letter-tasks", "stream": True, "env": {"C": "d"}}
    )
    judge: vf.AgentConfig = AGENT


class RaceEnv(vf.Env[RaceConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        for agent in (agents.writer, agents.rival, agents.writer, agents.judge):
            await agent.run(task)

    async def finalize(self, task, episode):
        """Reward the runs whose text is longest."""
        longest = max(len(trace.last_reply) for trace in episode.traces)
        for trace in episode.traces:
            trace.record_reward("longest", float(len(trace.last_reply) == longest))
