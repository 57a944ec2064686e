"""Rules about the processes of a run: their GPUs, their terminal, and when they end."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import fact, spans_hosts
from rl.config.limits import value_of
from rl.config.schema import seconds_of
from rl.runtime.stop_when import StopWhen

Config = Mapping[str, Any]


def devices(config: Config) -> Iterator[str]:
    """Refuse names of this machine's GPUs in a run that starts processes on other hosts."""
    for key in ("inference.devices", "trainer.devices"):
        names = value_of(config, key)
        if names is not None and "cluster" in config and spans_hosts(config["cluster"]):
            yield (
                f"{key}={names} names GPUs of this machine, but {config['cluster']['_target_']} "
                f"uses other machines, too: set {key}=null, and on each CUDA_VISIBLE_DEVICES"
            )


def time_limit(config: Config) -> Iterator[str]:
    """Check that max_time is a valid duration."""
    try:
        if (max_time := config.get("max_time")) is not None:
            seconds_of(max_time)
    except ValueError as error:
        yield f"max_time={error}, or null"


def debugging(config: Config) -> Iterator[str]:
    """Require one rank on this machine for trainer.debug, as only one can read the terminal."""
    if not config["trainer"]["debug"]:
        return
    if (ranks := config["trainer"]["ranks"]) not in (None, 1):
        yield (
            f"trainer.debug=true runs one rank in this terminal, but trainer.ranks={ranks}: set "
            "trainer.ranks=1"
        )
    if spans_hosts(config["cluster"]):
        yield "trainer.debug=true needs a trainer on this machine: use cluster=local"


def early_stop(config: Config) -> Iterator[str]:
    """Check that stop_when is a condition, and that the run records its metric."""
    if config["stop_when"] is None:
        return
    try:
        metric = StopWhen.of(config["stop_when"]).metric
    except ValueError as error:
        yield f"stop_when={error}"
        return
    if metric.startswith("eval/") and not fact(config["evaluation"]["_target_"], "evaluates", True):
        yield f"stop_when reads {metric}, but the run has no evaluation: use evaluation=default"
