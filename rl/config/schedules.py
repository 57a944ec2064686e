"""Schedules: numbers of a configuration that are functions of the training step.

    sampler: {temperature: {_target_: rl.schedule.linear, start: 1.0, end: 0.6, steps: 500}}
    -> sampler: {temperature: 1.0}, schedules: {sampler.temperature: {_target_: ...}}

`split_schedules` makes this change. `Schedules.apply` gives a component its values at a step. For
the components that sample rollouts and compute their advantages, the step is the policy version
with which a group starts. For the trainer's components, it is the training step itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from rl.config.annotations import has_target, takes_only_int
from rl.config.facts import Config, fact
from rl.config.limits import value_of
from rl.config.signatures import options_of

SCHEDULED = (
    *("sampler.temperature", "sampler.max_tokens", "evaluation.temperature", "env.*", "reward.*"),
    *("truncation.*", "advantage.*", "loss.*", "correction.*", "kl.beta", "entropy_bonus"),
)
_MAX_CALLS = 10_000_000  # maximum number of calls of a schedule to find its extremes


def schedule_nodes(value: Any, path: str = "") -> Iterator[tuple[str, Config]]:
    with suppress(LookupError):  # check.py reports a target that does not exist
        if has_target(value) and fact(str(value["_target_"]), "is_schedule", False):
            yield path, value
            return
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if key != "schedules":
            yield from schedule_nodes(item, f"{path}.{key}" if path else str(key))


def with_values(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `config` with `changes`, a mapping {key with at most one dot: value}."""
    result = dict(config)
    for key, value in changes.items():
        group, _, name = key.partition(".")
        result[group] = {**result[group], name: value} if name else value
    return result


def split_schedules(config: Config) -> dict[str, Any]:
    """Return a copy with the schedules in the key `schedules`, and a number in place of each.

    The number is the largest value of the schedule, so that a run whose KL penalty begins at 0
    loads the reference. For an option of `env` it is the value at step 0, which a warm start uses.
    """
    if not (nodes := dict(schedule_nodes(config))):
        return dict(config)
    config, steps = {**config, "schedules": nodes}, _steps(config)
    functions = Schedules.of(config).functions.items()
    return with_values(
        config, {k: f(0) if k.startswith("env.") else max(map(f, steps)) for k, f in functions}
    )


def join_schedules(config: Config) -> dict[str, Any]:
    """Undo `split_schedules`: return the configuration with schedules instead of their numbers."""
    config = dict(config)
    return with_values(config, config.pop("schedules", None) or {})


def _steps(config: Config) -> range:
    """Return the steps 0..max_steps, at most _MAX_CALLS; only 0 if max_steps is invalid."""
    last = config["max_steps"]
    return range(min(last, _MAX_CALLS) + 1 if type(last) is int and last > 0 else 1)


def configs_at_extremes(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("at step k: ", config at k) for each schedule's extremes; ("", config) if none."""
    config = split_schedules(config)
    schedules = Schedules.of(config)
    functions = schedules.functions.values()
    steps = _steps(config) if functions else range(0)
    extremes = {extreme(steps, key=f) for f in functions for extreme in (min, max)}
    for step in sorted(extremes):
        yield f"at step {step}: ", with_values(config, schedules.values(step))
    if not extremes:
        yield "", config


@dataclass(frozen=True, eq=False)
class Schedules:
    """The schedules of a run by dotted key, as functions of the step; none by default."""

    functions: Mapping[str, Callable[[int], float]] = field(default_factory=dict)

    @staticmethod
    def of(config: Config) -> "Schedules":
        nodes = config.get("schedules") or {}
        return Schedules({key: _function_of_step(config, key, node) for key, node in nodes.items()})

    def values(self, step: int) -> dict[str, float]:
        return {key: function(step) for key, function in self.functions.items()}

    def options(self, group: str, step: int) -> dict[str, Any]:
        """Return {scheduled option: value at `step`} of a config group; "" is the top level."""
        pairs = ((key.rpartition("."), value) for key, value in self.values(step).items())
        return {name: value for (parent, _, name), value in pairs if parent == group}

    def apply(self, component: Any, group: str, step: int) -> Any:
        """Set `component`'s scheduled options to their values at `step`. Return it or a partial."""
        options = self.options(group, step)
        if isinstance(component, partial):
            return partial(component, **options) if options else component
        for name, value in options.items():
            if not hasattr(component, name):
                raise ValueError(
                    f"{group}.{name} is a schedule, but {type(component).__name__} has no "
                    f"attribute {name} that could change: store the option as self.{name}"
                )
            object.__setattr__(component, name, value)  # the instance may be a frozen dataclass
        return component

    def at(self, step: int, record: Any, **groups: str) -> Any:
        """Return a copy of the dataclass `record` with the values of the schedules at `step`.

        `groups`: field -> config group of its value, for example token_loss="loss".
        """
        return replace(
            record, **{f: self.apply(getattr(record, f), g, step) for f, g in groups.items()}
        )


NO_SCHEDULES = Schedules()


def _function_of_step(config: Config, key: str, node: Config) -> Callable[[int], float]:
    module, _, name = node["_target_"].rpartition(".")
    options = {option: value for option, value in node.items() if option != "_target_"}
    function = partial(getattr(import_module(module), name), **options)
    group, _, option = key.rpartition(".")
    known = None
    with suppress(LookupError):  # check.py refuses a target that does not exist
        target = value_of(config, f"{group}._target_") or "rl.config.schema.Run"
        known = options_of(str(target)).get(option)
    return (lambda step: round(function(step))) if known and takes_only_int(known) else function
