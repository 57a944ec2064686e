"""The process on the terminal: checks, prepares, starts, watches, cleans up. Imports no torch.

    check ---> model folder (built or fetched, warm-started once) ---> inference, rollouts,
    trainer ranks
                                                                          |
    screen <--- status/*.json, metrics.jsonl ---- watch: a part that ends too early ends the run

Each part is a process group of its own with its own log. Whatever ends this process, the reaper
ends theirs.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from envs.cache import cache_folder
from rl.config.build import build, construct
from rl.config.check import check
from rl.config.facts import spans_hosts
from rl.config.resume_rules import has_steps, run_folder_problems
from rl.config.schema import ConfigError, Run, refused
from rl.model.folder import fingerprint
from rl.model.shape import shape_of
from rl.model.trainable import check_trainable
from rl.placement.placement import Plan
from rl.placement.settings import settled
from rl.placement.sized import sized
from rl.report.finished_runs import how_to_go_on, steps_done
from rl.report.screen import Screen, final_summary
from rl.run.child import Reaper
from rl.run.commit import commit_of
from rl.run.failure import OutOfTime, RunFailed
from rl.run.folder import RunFolder
from rl.run.lock import FULL, ensure_free, locked
from rl.run.metrics import column, read_metrics
from rl.run.status import STOPPED, progress_of, read_statuses, training_is_done
from rl.run.stop_request import Stopped, StopRequest, stopped_by_signals
from rl.run.terminal import say
from rl.run.typed import key_of
from rl.supervisor.base_model import fetch_references, make_cache, model_of
from rl.supervisor.children import Children
from rl.supervisor.remote_plan import demand_of, on_hosts, planned
from rl.supervisor.sources import check_imports
from rl.supervisor.time_limit import TimeLimit
from rl.supervisor.warm_start import IMITATION, keep_result, warm_start_key, warm_start_run

CONSTRUCTED = (
    *("model", "adapter", "env", "order", "sampler", "client", "buffer", "optim", "inference"),
    *("cluster", "logger", "evaluation", "record"),
)


def supervise(
    config: dict[str, Any],
    *,
    overrides: list[str],
    choices: dict[str, str],
    command: Sequence[str],
    compose: Callable[[list[str]], dict[str, Any]],
) -> float | None:
    """Do a whole run and return the mean reward of its last ten steps (None without rewards).

    Args:
        config: resolved configuration.
        overrides: what the command line changed, as written.
        choices: which file of each group was chosen.
        command: the command line before its overrides, as written.
        compose: makes a resolved configuration out of overrides.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        FolderUnusable: another process has the run's folder, or it cannot be written.
        RunFailed: the run ended early; the message is for the user.
        OutOfTime: it did, well, because max_time is over.
        Stopped: because a signal asked for it.

    """
    run_folder = RunFolder(Path(str(config.get("output_dir")), str(config.get("run_name"))))
    ensure_free(run_folder)  # first: the check would only say that the folder holds a run
    check(config, choices=_known_by_choice(choices, overrides))
    config = settled(config, planned(config)[0])
    run = Run(**config)
    limit = TimeLimit(run.max_time, run_folder)
    construct(run, CONSTRUCTED)  # only a constructor sees what no signature tells
    check_imports(config)
    if run.resume and _is_at_its_end(run, run_folder):
        say(f"already at max_steps={run.max_steps} of {run_folder}: raise max_steps to go on")
        say(final_summary(run_folder))
        return _result(run_folder)
    ours = locked(run_folder, undone_by=ConfigError)
    with stopped_by_signals() as stop, ours, Reaper() as reaper:
        _check_folder(config)
        # A start of ours that did not get as far as a step; anything else there is the user's.
        if run_folder.overrides.is_file() and not has_steps(run_folder.path):
            run_folder.clear_preparations(but=run.model.get("path"))
        record = {"overrides": overrides, "choices": choices, "command": list(command)}
        record |= {"started_in": os.getcwd(), "run_name": run.run_name, "commit": commit_of()}
        fetch_references(config)
        try:
            with _disk_full_is_said():
                text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
                run_folder.overrides.write_text(text)
                model = model_of(
                    run_folder, lambda: _prepared(run, run_folder, reaper, compose, limit)
                )
                _say_what_is_done_again(run_folder)
                _execute(run, model, reaper, stop, limit, waits=True)
        except RunFailed as error:
            message = f"{error}\n{how_to_go_on(run_folder)}"
            if stop.number:  # whoever asked for the end wants no further job of a sweep either
                say(message)
                raise Stopped(stop.number, 1) from error
            raise RunFailed(message) from error
        except KeyboardInterrupt:
            say(how_to_go_on(run_folder))
            raise
        return _ended_well(run, run_folder, stop, limit)


def _ended_well(
    run: Run, run_folder: RunFolder, stop: StopRequest, limit: TimeLimit
) -> float | None:
    """Say what the run has come to, and return its result; raise what ended it before its time."""
    rows, trainer = read_metrics(run_folder), read_statuses(run_folder).get("trainer.rank0")
    is_cut_short = steps_done(rows) < run.max_steps
    reason = progress_of(trainer.doing) if trainer else ""
    if is_cut_short and stop.asked:
        reason = f"max_time={run.max_time} is over" if limit.is_over else STOPPED
    if is_cut_short and reason:
        say(f"ended before max_steps={run.max_steps}: {reason}")
    say(final_summary(run_folder))
    if stop.number:
        raise Stopped(stop.number)  # nor does a sweep go on
    if is_cut_short and limit.is_over:
        raise OutOfTime(reason)
    return _result(run_folder)


def _is_at_its_end(run: Run, run_folder: RunFolder) -> bool:
    """Whether nothing is left to do; a last evaluation that was cut off is."""
    return training_is_done(run_folder) and run_folder.num_saved_steps() >= run.max_steps


def _result(run_folder: RunFolder) -> float | None:
    """What a sweeper maximises: the mean reward of the last ten steps."""
    rewards = column(read_metrics(run_folder), "train/reward")[-10:]
    return sum(rewards) / len(rewards) if rewards else None


@contextmanager
def _disk_full_is_said() -> Iterator[None]:
    """Of what this process writes itself; what the others meet, they report."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise RunFailed(f"{error}: make room there first") from error


def _known_by_choice(choices: dict[str, str], overrides: list[str]) -> dict[str, str]:
    """The choices less those whose callable the command line replaced: it is no longer theirs."""
    replaced = {key_of(override) for override in overrides}
    return {group: it for group, it in choices.items() if f"{group}._target_" not in replaced}


def _check_folder(config: dict[str, Any]) -> None:
    """Look once more, now that it is locked: another run may have come and gone meanwhile."""
    if problems := list(run_folder_problems(config)):
        raise ConfigError(problems)


def _say_what_is_done_again(run_folder: RunFolder) -> None:
    saved, num_steps = run_folder.num_saved_steps(), steps_done(read_metrics(run_folder))
    if saved < num_steps:
        say(
            f"going on after {saved} steps: the {num_steps - saved} later ones are in no "
            f"checkpoint and are done again (their numbers: {run_folder.dropped_metrics})"
        )


def _prepared(
    run: Run,
    run_folder: RunFolder,
    reaper: Reaper,
    compose: Callable[[list[str]], dict[str, Any]],
    limit: TimeLimit,
) -> Path:
    """Return the local folder of the model, warm-started if the config asks for it."""
    source = build(run.model)()
    if run.model["warm_start"] is None:
        with refused():
            return _trainable(source.prepare(run_folder.built_model))
    supervised = RunFolder(run_folder.warm_start)
    first = warm_start_run(run, compose(IMITATION), supervised.path)
    kept = cache_folder() / "warm" / warm_start_key(first)
    if not kept.is_dir():
        make_cache(kept.parent)
        with refused():
            shutil.rmtree(supervised.path, ignore_errors=True)
            model = _trainable(source.prepare(supervised.built_model))
        say(f"warm start: {first.max_steps} supervised steps, once for this model and environment")
        # Signals end it at once: half an imitation is of no use, so it has nothing to save.
        _execute(first, model, reaper, StopRequest(), limit, waits=False)
        if steps_done(read_metrics(supervised)) < first.max_steps:  # one of its parts was told to
            raise RunFailed("the warm start was stopped before its end, so nothing of it is kept")
        keep_result(supervised, kept)
    return kept


def _trainable(model: Path) -> Path:
    check_trainable(model)
    return model


def _execute(
    run: Run, model: Path, reaper: Reaper, stop: StopRequest, limit: TimeLimit, *, waits: bool
) -> None:
    """Start all processes of a run and watch them; `waits`: signals let it save first."""
    run_folder = RunFolder(run.folder)
    run, plan = _planned(run, model, waits)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save(run_folder.config)
    run_folder.versions.write_text(json.dumps(_versions(), indent=1))
    run_folder.clear_processes()
    run_folder.private.make(shared=spans_hosts(run.cluster))
    if spans_hosts(run.cluster):
        run_folder.private.make_key()
    run_folder.set_model(model, fingerprint(model))
    with ExitStack() as stack:
        # What was registered last ends first: the children, then the sockets they listen on.
        stack.callback(run_folder.private.clear)
        cluster = build(run.cluster)()
        hosts = stack.enter_context(cluster.hosts(run_folder, reaper, demand_of(run, plan)))
        children = Children(run, run_folder, reaper, on_hosts(plan, hosts), hosts)
        stack.callback(children.close)
        children.start()
        saved = run_folder.num_saved_steps()
        with Screen(run_folder, run.max_steps, num_saved=saved) as screen:
            stop.waits = waits

            def tick() -> None:
                screen.update()
                limit.look(stop)

            try:
                children.watch(tick, stop)
            finally:
                stop.waits = False


def _planned(run: Run, model: Path, shown: bool) -> tuple[Run, Plan]:
    """Return the run with what its model leaves to vLLM, and where its parts go; say so."""
    plan, hosts = planned(asdict(run))
    config, page = sized(asdict(run), plan, hosts, shape_of(model))
    if shown:
        say(page)
    return Run(**config), plan


def _versions() -> dict[str, str]:
    return dict(sorted((d.metadata["Name"], d.version) for d in distributions()))
