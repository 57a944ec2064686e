"""The supervisor process: it prepares a run, starts its processes, watches them and cleans up.

    check the configuration ---> lock the run folder ---> prepare the initial model
                                                                   |
    clean up <--- watch until the ranks end <--- start vLLM, the rollouts process and the ranks

While the supervisor watches, the screen shows what the processes write to status/*.json and
metrics.jsonl. If a process ends too early and cannot be restarted, the supervisor ends the run.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from envs.loading import cache_folder
from rl.cluster.host import Demand
from rl.config.build import build, construct
from rl.config.initial import initial_checkpoint
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import ConfigError, Run, as_config_error
from rl.dry_call.child import DryCall
from rl.model.folder import check_teacher, check_trainable, fingerprint
from rl.model.pretrained import check_files
from rl.model.shape import read_sizes
from rl.runtime.child import Reaper
from rl.runtime.code_copies import changed_code, copy_code
from rl.runtime.commit import commit_of
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.files import write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.lock import FULL, ensure_free, locked
from rl.runtime.metrics import column, num_steps_done, read_metrics, steps_done, training_reward
from rl.runtime.start_record import resume_advice
from rl.runtime.status import STOPPED, read_statuses, training_is_done
from rl.runtime.stop_request import Stopped, StopRequest, stopped_by_signals
from rl.runtime.stop_when import is_fulfilled
from rl.runtime.text import leaves, say
from rl.supervisor.base_model import check_model, fetch_references, make_cache_folder, model_of
from rl.supervisor.children import Children
from rl.supervisor.resolve import Resolved, assign_devices, resolve, with_devices
from rl.supervisor.time_limit import TimeLimit
from rl.supervisor.warm_start import alone_with, move_to_cache, warm_start_key, warm_start_run
from rl.terminal.screen import Screen, final_summary

CONSTRUCTED = (
    *("model", "adapter", "env", "order", "sampler", "client", "buffer", "optim", "inference"),
    *("cluster", "logger", "evaluation", "record"),
)
Compose = Callable[[str], dict[str, Any]]


def supervise(
    config: dict[str, Any], *, overrides: list[str], command: Sequence[str], compose: Compose
) -> float | None:
    """Supervise a run from start to end. Return the mean reward of its last ten steps.

    Return None if no step has a reward. `compose(name)` returns the configuration conf/<name>.yaml
    without `overrides`.

    Raises:
        ConfigError: the configuration cannot work, so no step was done.
        FolderUnusable: another process uses the run's folder, or the folder cannot be written.
        RunFailed: the run ended early because of an error.
        OutOfTime: max_time is over. The run has saved a checkpoint and ended.
        Stopped: a signal ended the run.
    """
    run_folder = RunFolder(Path(str(config.get("output_dir")), str(config.get("run_name"))))
    # Check the lock first, because an error of `resolve` does not name the locking process.
    ensure_free(run_folder)
    resolved = resolve(config)
    run = resolved.run
    limit = TimeLimit(run.max_time, run_folder)
    construct(run, CONSTRUCTED)  # raises ConfigError if a component refuses its options
    if run.resume and _is_complete(run, run_folder):
        return _end_complete_run(run, run_folder)
    say("checking the run's components")
    lock, dry_call = locked(run_folder, delete_on=ConfigError), DryCall([run.plain()])
    with stopped_by_signals() as stop, lock, Reaper() as reaper, dry_call:
        # Check again under the lock, because another run may have used the folder meanwhile. Check
        # the planned number of ranks, because trainer.ranks may be null in `config`.
        planned = config | {"trainer": {**config["trainer"], "ranks": run.trainer.ranks}}
        if problems := list(run_folder_problems(planned)):
            raise ConfigError(problems)
        # If an earlier start of this run finished no step, delete its model and warm-start folder.
        if run_folder.overrides.is_file() and not run_folder.has_results():
            run_folder.clear_model_files(keep=run.model.path)
        record = {"overrides": overrides, "command": list(command)}
        record |= {"started_in": os.getcwd(), "run_name": run.run_name, "commit": commit_of()}
        launch = _Launch(run_folder, reaper, stop, limit, dry_call, fetch_references(run))
        try:
            with reporting_full_disk():
                text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
                write_atomically(run_folder.overrides, text)
                model = model_of(run_folder, lambda: launch.prepare_model(run, compose))
                check_model(run, model)
                launch.check_references(model)
                _print_repeated_steps(run_folder)
                if changed := changed_code(run_folder):
                    say(f"continuing with changed files: {', '.join(changed)}")
                launch.execute(resolved, model)
        except RunFailed as error:
            message = f"{error}\n{resume_advice(run_folder)}"
            if stop.number:  # a signal must end a whole sweep; RunFailed would end only this job
                say(message)
                raise Stopped(stop.number, 1) from error
            raise RunFailed(message) from error
        except KeyboardInterrupt:
            say(resume_advice(run_folder))
            raise
        return _end_run(run, run_folder, stop, limit)


def _is_complete(run: Run, run_folder: RunFolder) -> bool:
    """Return whether the run has reached max_steps or stop_when, and has saved its last step."""
    num_saved, rows = run_folder.num_saved_steps(), read_metrics(run_folder)
    is_reached = num_saved == steps_done(rows) and is_fulfilled(run.stop_when, rows)
    return (num_saved >= run.max_steps or is_reached) and training_is_done(run_folder)


def _end_complete_run(run: Run, run_folder: RunFolder) -> float | None:
    # Delete sockets and keys, which remain if the run was killed after its last step.
    with locked(run_folder):
        run_folder.private.clear()
    key = "max_steps" if run_folder.num_saved_steps() >= run.max_steps else "stop_when"
    say(f"{run_folder} has reached {key}={getattr(run, key)}: change {key} to continue")
    say(final_summary(run_folder))
    return training_reward(column(read_metrics(run_folder), "train/reward"))


def _end_run(run: Run, run_folder: RunFolder, stop: StopRequest, limit: TimeLimit) -> float | None:
    """Print the summary. Return the mean reward, or raise Stopped or OutOfTime."""
    rows, trainer = read_metrics(run_folder), read_statuses(run_folder).get("trainer.rank0")
    is_cut_short = steps_done(rows) < run.max_steps
    reason = trainer.progress if trainer else ""
    if is_cut_short and stop.asked:
        reason = f"max_time={run.max_time} is over" if limit.is_over else STOPPED
    if is_cut_short and reason:
        say(f"ended before max_steps={run.max_steps}: {reason}")
    say(final_summary(run_folder))
    if stop.number:
        raise Stopped(stop.number)  # ends a whole sweep, whereas OutOfTime ends only this job
    if is_cut_short and limit.is_over:
        raise OutOfTime(reason)
    return training_reward(column(rows, "train/reward"))


@contextmanager
def reporting_full_disk() -> Iterator[None]:
    """Raise RunFailed with a remedy if the block fails because the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise RunFailed(f"{error}: free space on this disk, then start again") from error


def _print_repeated_steps(run_folder: RunFolder) -> None:
    saved, num_steps = run_folder.num_saved_steps(), num_steps_done(run_folder)
    if saved < num_steps:
        say(
            f"continuing after step {saved}: the run repeats the steps up to {num_steps}, because "
            f"no checkpoint contains them (their old metrics: {run_folder.dropped_metrics})"
        )


@dataclass(frozen=True)
class _Launch:
    run_folder: RunFolder
    reaper: Reaper
    stop: StopRequest
    limit: TimeLimit
    dry_call: DryCall
    references: Sequence[Path] = ()  # folders of the reference models

    def prepare_model(self, run: Run, compose: Compose) -> Path:
        with as_config_error():
            if checkpoint := initial_checkpoint(vars(run)):
                check_files(model := RunFolder.export_of(checkpoint))
                check_trainable(model)
                return model
        if run.model.warm_start is None:
            return self._build_model(run, self.run_folder)
        supervised = RunFolder(self.run_folder.warm_start)
        warm_run = warm_start_run(run, compose("warm_start"), supervised.path)
        with DryCall([warm_run.plain()]) as dry_call:
            cached = cache_folder() / "warm" / warm_start_key(warm_run, dry_call.files())
            if cached.is_dir():
                return cached
            make_cache_folder(cached.parent)
            with alone_with(cached, lambda: self.limit.request_stop_if_due(self.stop)):
                if not cached.is_dir():
                    self._warm_start(run, warm_run, supervised, dry_call)
                    move_to_cache(supervised, cached)
        return cached

    def _warm_start(self, run: Run, warm_run: Run, folder: RunFolder, dry_call: DryCall) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        model = self._build_model(run, folder)
        self.check_references(model)
        # Raise ConfigError for an unusable loss now, not after a warm start of about 40 s.
        self.dry_call.learned()
        say(f"warm start: {warm_run.max_steps} supervised steps, once per model and environment")
        # Signals go to `self.stop` and not to the new StopRequest. They end the warm start at once,
        # because `self.stop.waits` is still False.
        launch = _Launch(folder, self.reaper, StopRequest(), self.limit, dry_call)
        launch.execute(assign_devices(warm_run), model, is_main=False)
        if num_steps_done(folder) < warm_run.max_steps:
            raise RunFailed("the warm start was stopped and is not saved: start the run again")

    def _build_model(self, run: Run, run_folder: RunFolder) -> Path:
        """Build or download the model. Raise ConfigError if it is unusable."""
        with as_config_error():
            model = build(run.model)().prepare(run_folder.built_model)
            check_trainable(model)
        return model

    def check_references(self, model: Path) -> None:
        """Raise ConfigError if a reference model cannot score the tokens of the policy."""
        with as_config_error():
            for reference in self.references:
                check_teacher(reference, model)

    def execute(self, resolved: Resolved, model: Path, *, is_main: bool = True) -> None:
        """Start all processes and watch them until they end. `is_main`: False for a warm start."""
        run_folder, stop = self.run_folder, self.stop
        sizes = read_sizes(model)
        resolved, page = resolved.size_memory(sizes)
        run, plan = resolved.run, resolved.plan
        if sizes and not run.adapter.freezes_base:
            self.limit.expect_checkpoint(sizes.parameters)
        if is_main:
            say(page)
        run_folder.path.mkdir(parents=True, exist_ok=True)
        run.save(run_folder.config)
        versions = {d.metadata["Name"]: d.version for d in distributions()}
        write_atomically(run_folder.versions, json.dumps(versions, indent=1, sort_keys=True))
        run_folder.clear_process_files()
        run_folder.private.make(shared=run.cluster.spans_hosts)
        if run.cluster.spans_hosts:
            run_folder.private.make_key()
        run_folder.set_model(model, fingerprint(model))
        with ExitStack() as stack:
            # Callbacks run in reverse order, so the children end before their sockets are deleted.
            stack.callback(run_folder.private.clear)
            cluster = build(run.cluster)()
            group = run.inference.tensor_parallel_size
            demand = Demand(len(plan.inference), group, len(plan.ranks))
            hosts = stack.enter_context(cluster.hosts(run_folder, self.reaper, demand))
            children = Children(run, run_folder, self.reaper, with_devices(plan, hosts), hosts)
            # vLLM starts during the dry call (rl/dry_call). The other processes need its results.
            children.start(lambda: self._record_dry_call(run))
            shown = {"num_saved": run_folder.num_saved_steps(), "is_main": is_main}
            # With trainer.debug, print lines, because a live panel would overwrite the debugger.
            console = Console(force_terminal=False) if run.trainer.debug else None
            with Screen(run_folder, run.max_steps, console, **shown) as screen:
                stop.waits = is_main

                def tick() -> None:
                    screen.update()
                    self.limit.request_stop_if_due(stop)

                try:
                    children.watch(tick, stop)
                finally:
                    stop.waits = False

    def _record_dry_call(self, run: Run) -> None:
        run = replace(run, learned=asdict(self.dry_call.learned()))
        run.save(self.run_folder.config)
        inputs = {group: run.plain()[group] for group in ("env", "sampler", "buffer")}
        texts = [text for _, text in leaves(inputs) if isinstance(text, str)]
        # Skip texts without letters or digits, such as the operator "*" of env=arithmetic.
        data = [os.path.expanduser(text) for text in texts if any(map(str.isalnum, text))]
        copy_code(self.run_folder, self.dry_call.files(), data)
