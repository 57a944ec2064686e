"""Everybody who asks which version is live asks the same object."""

import asyncio

from rl.inference.live_version import LiveVersion
from tests.support.virtual_time import run_virtually


def test_a_task_waits_for_the_first_live_version():
    version = LiveVersion()
    assert version.number == -1

    async def main() -> tuple[int, float]:
        asyncio.get_running_loop().call_later(5.0, version.publish, 3)
        return await version.first(), asyncio.get_running_loop().time()

    assert run_virtually(main()) == (3, 5.0)
    assert version.number == 3
