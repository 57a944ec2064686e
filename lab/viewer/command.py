"""The command line of view.py, which shows runs in the browser or exports them to one file."""

import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rich.console import Console

from lab.runs import folders_and_options, runs_at
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import program
from rl.runtime.text import printable, relative_path

if TYPE_CHECKING:
    from lab.viewer.index import RunIndex

USAGE = """\
Show the rollouts of a run, and what training recorded for every token:

    python view.py outputs/run                        in the browser, also while it trains
    python view.py outputs/one outputs/other          the same question in several runs
    python view.py outputs/sweeps/a-sweep             all runs of a sweep
    python view.py outputs/run step=120 export=page.html      one file to mail

    port=8000                the port of the viewer; by default a free port
    step=120                 only this training step, or this version of an evaluated policy
    source=  env=            only training or evaluation; only this environment
"""
FILTERS = ("step", "source", "env")
KEYS = ("port", "export", *FILTERS)


def main(words: Sequence[str]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    if not words or set(words) & {"-h", "--help", "help"}:
        console.print(USAGE.replace("python view.py", program("view")), markup=False)
        console.print(printable(_list_of_runs()), markup=False)
        return 0
    try:
        _view(words, console)
    except (ValueError, OSError) as error:
        remedy = ": choose another path or port" if isinstance(error, OSError) else ""
        console.print(printable(f"{error}{remedy}"), markup=False, style="red")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _list_of_runs() -> str:
    runs = [run.folder.path for run in runs_at(Path("outputs")) if run.folder]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    if not runs:
        return f"There are no runs in outputs/ yet: start one with {program('train')}."
    listed = [f"    {program('view')} {relative_path(run)}" for run in runs[:20]]
    return "\n".join([f"The latest of {len(runs)} runs:", "", *listed])


def _runs_of(folders: Sequence[Path]) -> dict[str, RunFolder]:
    """Return the runs of all folders by unique name. Raise ValueError for a folder without runs."""
    runs: dict[Path, RunFolder] = {}
    for folder in folders:
        found = [run.folder for run in runs_at(folder) if run.folder and run.folder.is_run]
        if not found:
            what = "holds no run" if folder.is_dir() else "does not exist"
            raise ValueError(f"{folder} {what}: {program('view')} lists the runs in outputs/")
        runs |= {run.path.resolve(): run for run in found}
    names = [path.name for path in runs]
    names = names if len(set(names)) == len(names) else [str(path) for path in runs]
    return dict(zip(names, map(RunFolder, runs), strict=True))


def _view(words: Sequence[str], console: Console) -> None:
    folders, options = folders_and_options(words, KEYS)
    port = options.get("port", "0")
    if not port.isdigit() or int(port) >= 2**16:
        raise ValueError(f"port={port} is not a port: give a number up to 65535, or 0")
    runs = _runs_of(folders)
    from lab.viewer.index import RunIndex  # not at the top, because the import takes a second

    indexes = {name: RunIndex(run) for name, run in runs.items()}
    with console.status("reading the runs"):
        for index in indexes.values():
            index.refresh()
    filters = {name: options[name] for name in FILTERS if name in options}
    if "export" in options:
        _export(Path(options["export"]), filters, indexes, console)
    else:
        _serve(int(port), filters, indexes, console)


def _export(
    path: Path, filters: dict[str, str], indexes: "Mapping[str, RunIndex]", console: Console
) -> None:
    from lab.viewer import answers
    from lab.viewer.export import page

    chosen = [
        (index, name, answers.row_numbers_with(index, filters)) for name, index in indexes.items()
    ]
    note = " ".join(f"{name}={value}" for name, value in filters.items())
    text = page([one for one in chosen if one[2]] or chosen, note)
    path.write_text(text, encoding="utf-8")
    console.print(f"{printable(str(path))} ({len(text) / 1e6:.1f} MB)", markup=False)


def _serve(
    port: int, filters: dict[str, str], indexes: "Mapping[str, RunIndex]", console: Console
) -> None:
    import uvicorn

    from lab.viewer.server import application

    fragment = f"#{urlencode(filters)}" if filters else ""
    key = secrets.token_urlsafe(12)
    # Listen before the server starts, so that early requests wait instead of failing.
    listener = socket.create_server(("127.0.0.1", port))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{key}/{fragment}"
    app = application(list(indexes.values()), list(indexes), key)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    console.print(address, markup=False)
    console.print("Ctrl-C stops the server. New rollouts appear on the page.", style="dim")
    uvicorn.Server(config).run(sockets=[listener])
