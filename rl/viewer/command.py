"""The command line: which runs to look at, and whether in the browser or as one file.

python view.py outputs/run [outputs/other ...] [port=8000] [export=page.html [where="step=1"]]
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from rich.console import Console

from rl.viewer.runs import NoRun, runs_in, runs_of

USAGE = """\
Look at what a run said, and at what training did with every token:

    python view.py outputs/run                        in the browser, also while it trains
    python view.py outputs/one outputs/other          the same question in several runs
    python view.py outputs/sweeps/a-sweep             all of its runs
    python view.py outputs/run where="step = 120"     these rollouts alone
    python view.py outputs/run export=page.html where="step = 120"    one file to mail

    port=8000    the port, else a free one
    where=...    SQL over step, source, env, reward, advantage, length, turns, staleness, push,
                 stop, used, error: where="source = 'evaluation' AND reward < 0.5"
"""
KEYS = ("port", "export", "where")


@dataclass
class Arguments:
    """What the command line asks for."""

    folders: list[Path] = field(default_factory=list)
    port: int = 0
    export: Path | None = None
    where: str | None = None


def parsed(words: Sequence[str]) -> Arguments:
    """Return what the words of a command line ask for.

    Raises:
        ValueError: one of them says nothing; the message is for the user.

    """
    arguments = Arguments()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or (name not in KEYS and Path(word).exists()):
            arguments.folders.append(Path(word))
        elif name not in KEYS:
            raise ValueError(
                f"{word}: there is no {name}=, only {', '.join(f'{k}=' for k in KEYS)}"
            )
        elif name == "port":
            if not value.isdigit() or int(value) >= 2**16:
                raise ValueError(f"port={value} is no port: give a number from 1024 to 65535")
            arguments.port = int(value)
        elif name == "export":
            arguments.export = Path(value)
        else:
            arguments.where = value
    if arguments.export is not None and not arguments.export.absolute().parent.is_dir():
        raise ValueError(f"export={arguments.export}: there is no folder {arguments.export.parent}")
    return arguments


def main(words: Sequence[str]) -> int:
    """Do what the command line asks for and return the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    if not words or set(words) & {"-h", "--help", "help"}:
        console.print(USAGE, markup=False)
        console.print(_runs_here(), markup=False)
        return 0
    try:
        arguments = parsed(words)
        return _view(arguments, console)
    except (NoRun, ValueError) as error:
        console.print(str(error), markup=False, style="red")
        return 2
    except KeyboardInterrupt:
        return 130


def _runs_here() -> str:
    runs = runs_in(Path("outputs"))
    if not runs:
        return "There are no runs in outputs/ yet: python train.py makes one."
    listed = [f"    python view.py {run}" for run in runs[:20]]
    more = [f"    ... and {len(runs) - 20} more"] if len(runs) > 20 else []
    return "\n".join(["Runs, the latest first:", "", *listed, *more])


def _view(arguments: Arguments, console: Console) -> int:
    runs = runs_of(arguments.folders)
    from rl.viewer.index import RunIndex  # a second of imports, for those who have something to see

    indexes = [RunIndex(run) for run in runs.values()]
    try:
        with console.status("reading") as status:
            for name, index in zip(runs, indexes, strict=True):
                index.refresh(
                    lambda read, total, name=name: status.update(
                        f"reading {name}: {read / 1e6:.0f} of {total / 1e6:.0f} MB"
                    )
                )
        for index in indexes:
            if index.not_kept:
                console.print(
                    f"{index.run_folder.name}: the index is in memory this time ({index.not_kept})",
                    markup=False,
                    style="dim",
                )
        if arguments.export is not None:
            _export(
                arguments.export, arguments.where, dict(zip(runs, indexes, strict=True)), console
            )
        else:
            _serve(indexes, list(runs), arguments, console)
    finally:
        for index in indexes:
            index.close()
    return 0


def _export(path: Path, where: str | None, indexes: dict, console: Console) -> None:
    from rl.viewer import answers
    from rl.viewer.export import Chosen, page

    chosen = [
        Chosen(index, name, answers.where(index, where or "true"))
        for name, index in indexes.items()
    ]
    note = f"where {where}" if where else ""
    text = page([one for one in chosen if one.numbers] or chosen, note)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"export={path} cannot be written: {error.strerror}") from error
    console.print(f"{path} ({len(text) / 1e6:.1f} MB)", markup=False)


def _serve(indexes: Sequence, names: Sequence[str], arguments: Arguments, console: Console) -> None:
    import uvicorn

    from rl.viewer import answers
    from rl.viewer.server import application, new_key

    chosen = ""
    if arguments.where is not None:
        answers.where(indexes[0], arguments.where)  # a condition that is none is said here
        chosen = "#" + urlencode({"where": arguments.where})
    key = new_key()
    listener = loopback(arguments.port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{key}/{chosen}"
    config = uvicorn.Config(
        application(indexes, names, key),
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    console.print(address, markup=False)
    console.print("Ctrl-C ends it. What it shows follows the run.", style="dim")
    uvicorn.Server(config).run(sockets=[listener])


def loopback(port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface, 0 for any free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()  # who follows the address at once waits a moment, and is not refused
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port={port} cannot be had ({error.strerror}): take another one"
        ) from error
    return listener
