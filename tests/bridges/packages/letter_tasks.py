"""A taskset with an environment of two turns and a harness that runs in this process."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness", "LetterEnv", "LetterTaskset"]


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData]):
    @vf.reward(weight=1.0)
    async def letters(self, trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return said.count(self.data.letter) / max(1, len(said))

    @vf.reward(weight=0.5)
    async def lower(self, trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        if said == "breakbreak":
            raise RuntimeError("the judge is broken")
        return sum(c.islower() for c in said) / max(1, len(said))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class LetterConfig(vf.TasksetConfig):
    size: int = 40
    alphabet: str = "abc"


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for i in range(self.config.size):
            letter = self.config.alphabet[i % len(self.config.alphabet)]
            prompt = f"write letters like {letter}"
            data = LetterData(prompt=prompt, system_prompt="be brief", letter=letter)
            yield LetterTask(data, self.config.task)


class InProcessConfig(vf.HarnessConfig):
    stream: bool = False


class InProcessHarness(vf.Harness[InProcessConfig]):
    """A harness with one request per segment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt]
        body = {"model": ctx.model, "messages": messages, "stream": self.config.stream}
        async with httpx.AsyncClient(timeout=None) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return ProgramResult(int(answer.status_code != 200), answer.text, "")


class LetterEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class LetterEnv(vf.Env[LetterEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            first = await chat.turn()
            if not first.terminated:
                await chat.turn("more")
