"""Environment code that blocks the loop is named while it does, and the run goes on."""

import asyncio
import re
import subprocess
import sys
import time
from itertools import pairwise

from envs.episode import Example
from envs.user_code import ROOT
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from rl.sampling.watchdog import Watchdog
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer

EXAMPLE = Example(id=3, env="scripted", messages=list(HI))


class Blocking(ScriptedEnv):
    """Its score blocks the loop where the policy said "bad"."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    async def score(self, episode):
        if episode.text == "bad":
            self.block()  # here
        return await super().score(episode)


class Noting(Watchdog):
    """Note after how many seconds it reports."""

    def _report(self, seconds):
        reports.append(seconds)
        super()._report(seconds)


reports = []


async def played(env, *, patience):
    sentences = []
    reports.clear()
    with Noting(sentences.append, patience=patience, interval=0.05) as watchdog:
        chat = RendererChat(
            SAMPLER, tiny_renderer(), ScriptedClient("bad", "good"), 256, LiveVersion(7)
        )
        player = Player(SAMPLER, env, chat, watchdog)
        return await player.play_group(0, EXAMPLE, 2), sentences


def test_a_score_that_blocks_is_named_with_its_line_and_counted_and_the_run_goes_on():
    (bad, good), sentences = asyncio.run(played(Blocking(lambda: time.sleep(1)), patience=0.2))

    assert (good.reward, bad.reward) == (2.0, 0.0)
    assert bad.blocked_time == reports[-1] > 0.2
    assert all(later > 2 * earlier for earlier, later in pairwise(reports))
    assert good.blocked_time == 0.0
    message = r"all rollouts have been blocked for .* s by .*\(test_watchdog\.py:\d+\)"
    assert re.match(message, sentences[0])


def test_a_library_in_between_does_not_hide_the_environments_line():
    def block():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)

    _, sentences = asyncio.run(played(Blocking(block), patience=0.2))
    assert "block (test_watchdog.py:" in sentences[0]


def test_code_of_rl_that_blocks_is_not_called_the_users():
    async def blocked():
        sentences = []
        with Watchdog(sentences.append, patience=0.2, interval=0.05) as watchdog:
            # The compiled frame belongs to a file of rl/, as if that file blocked.
            code = compile("import time\ntime.sleep(1)", str(ROOT / "rl/records.py"), "exec")
            asyncio.get_running_loop().call_soon(exec, code)
            await asyncio.sleep(0.01)
            return sentences, watchdog.pop_blocked_seconds()

    assert asyncio.run(blocked()) == ([], 0.0)


def test_a_loop_that_is_alive_is_left_alone():
    async def alive():
        sentences = []
        with Watchdog(sentences.append, patience=1.0, interval=0.05) as watchdog:
            for _ in range(30):
                await asyncio.sleep(0.01)
            task = asyncio.current_task()
            watchdog._blocked[task] = 2.0  # read once, by the rollout that blocked
            assert [watchdog.pop_blocked_seconds() for _ in range(2)] == [2.0, 0.0]
        shipped = Watchdog(sentences.append)
        assert (shipped._patience, shipped._interval) == (3.0, 0.5)
        return sentences

    assert asyncio.run(alive()) == []
