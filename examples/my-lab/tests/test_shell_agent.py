"""Test that env=shell-agent finds its tasks. tests/envs/test_agent.py plays an episode."""

from composing import composed

from rl.config.build import build, construct
from rl.config.schema import Run


def test_the_tasks_and_the_program_are_found() -> None:
    run = Run.of(composed("env=shell-agent"))
    construct(run, ["env"])
    env = build(run.env)()
    train, held_out = env.examples("train"), env.examples("eval")
    assert (len(train), len(held_out)) == (16, 4)
    assert train[0].info["answer"] in train[0].messages[0]["content"]
