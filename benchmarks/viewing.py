"""How long view.py keeps a person waiting, over as many rollouts as a long run leaves.

    python -m benchmarks.viewing [--rollouts 100000]

The rollouts are made up: short questions, 16 answers each. One JSON line each; a time is the median
of several, in seconds, `processor` without what others do on the machine:

    {"what": "index", "seconds": ..., "processor": ..., "rollouts": 100000}   all files
    {"what": "search", ...}  {"what": "condition", ...}  ...                  a question to it
    {"what": "first_paint", ...}  {"what": "filter", ...}                     in Chromium
    {"what": "blank_frames", "share": 0.0}                                    while scrolling
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import uvicorn

from benchmarks._timing import seconds
from rl.run.folder import RunFolder
from rl.viewer import answers
from rl.viewer.command import loopback
from rl.viewer.index import RunIndex
from rl.viewer.server import application

GROUP_SIZE, GROUPS = 16, 8  # of a step
REPEATS = 7
# Clicks and counts what is drawn, frame by frame.
FILTER = """async () => {
    const frame = () => new Promise(requestAnimationFrame);
    await frame();
    const began = performance.now();
    document.querySelector('[data-choice="used=false"]').click();
    await frame();
    return performance.now() - began;
}"""
SCROLL = """async () => {
    const list = document.getElementById("list");
    let blank = 0;
    for (let i = 0; i < 200; i++) {
        list.scrollTop = (i * 7919 * 53) % list.scrollHeight;
        await new Promise(requestAnimationFrame);
        const box = list.getBoundingClientRect();
        for (const share of [0.02, 0.5, 0.98]) {
            const at = document.elementFromPoint(box.left + 60, box.top + share * box.height);
            if (!at.closest(".question")) { blank++; break; }
        }
    }
    return blank / 200;
}"""


def write_run(folder: Path, num_rollouts: int) -> Path:
    """Return the folder of a run with this many rollouts, rounded up to whole steps."""
    random = Random(0)
    (folder / "rollouts").mkdir(parents=True)
    num_steps = -(-num_rollouts // (GROUP_SIZE * GROUPS))
    for step in range(num_steps):
        lines = []
        for group in range(step * GROUPS, (step + 1) * GROUPS):
            word = "".join(random.choices("abcdefghij", k=5))
            for place in range(GROUP_SIZE):
                answer = word[::-1] if random.random() < step / num_steps else word
                lines.append(json.dumps(_line(random, step, group, place, word, answer)) + "\n")
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text("".join(lines))
    return folder


def _line(
    random: Random, step: int, group: int, place: int, word: str, answer: str
) -> dict[str, Any]:
    reward = float(answer == word[::-1])
    return {
        **{"id": f"{group:06d}.{place}", "group": group, "example": group, "env": "reverse-text"},
        "messages": [
            {"role": "user", "content": f"reverse: {word}"},
            {"role": "assistant", "content": answer},
        ],
        **{"reward": reward, "rewards": {"exact": reward}, "shaped_reward": reward},
        **{"advantage": reward - 0.5, "stop_reason": "stop", "turns": 1, "tool_calls": 0},
        **{"tokens": random.randrange(3, 20), "versions": [max(0, step - 1)]},
        **{"used": group % 10 > 0, "error": ""},
    }


def measured(what: str, work: Callable[[], object], repeats: int = REPEATS) -> dict[str, Any]:
    """Return the line of a piece of work."""
    walls, processors = [], []
    for _ in range(repeats):
        before = time.process_time()
        walls.append(seconds(work))
        processors.append(time.process_time() - before)
    return {
        "what": what,
        "seconds": round(median(walls), 4),
        "processor": round(median(processors), 4),
    }


def in_browser(index: RunIndex) -> None:
    """Print what Chromium takes."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        print(json.dumps({"what": "browser", "missing": "Chromium (make browser)"}))
        return
    from playwright.sync_api import sync_playwright

    listener = loopback(0)
    server = uvicorn.Server(
        uvicorn.Config(application([index], ["run"], "key"), log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/key/"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})

        def paint() -> None:
            page.goto("about:blank")
            page.goto(address)
            page.wait_for_selector("#list .question")

        paint()  # the first one starts the browser's processes
        print(json.dumps(measured("first_paint", paint)))
        times = [page.evaluate(FILTER) / 1000 for _ in range(REPEATS)]
        print(json.dumps({"what": "filter", "seconds": round(median(times), 4)}))
        paint()
        print(json.dumps({"what": "blank_frames", "share": page.evaluate(SCROLL)}))
        browser.close()
    server.should_exit = True
    thread.join()


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    num_rollouts = parser.parse_args().rollouts
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(write_run(Path(folder) / "run", num_rollouts))
        indexes: list[RunIndex] = []

        def build() -> None:
            for index in indexes:
                index.close()
            run.viewer_index.unlink(missing_ok=True)
            indexes[:] = [RunIndex(run)]
            indexes[0].refresh()

        print(json.dumps(measured("index", build, 3) | {"rollouts": num_rollouts}))
        (index,) = indexes
        for what, ask in {
            "search": lambda: answers.search(index, "abc"),
            "condition": lambda: answers.where(index, "step = 100 AND reward > 0.5"),
            "group": lambda: answers.rollouts(index, range(800, 800 + GROUP_SIZE)),
            "nothing_new": index.refresh,
            "table": lambda: answers.table(index),
        }.items():
            print(json.dumps(measured(what, ask)))
        in_browser(index)
        index.close()


if __name__ == "__main__":
    main()
