"""The page in a real browser: both charts are drawn, light and dark, and nothing is fetched."""

import re
import shutil
from pathlib import Path

import pytest

from lab.report.command import main
from tests.support.finished_runs import made_arm, made_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
DRAWN = ("#forest svg .mark-group path", "#curves svg .mark-group path")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")


@pytest.fixture
def opened():
    """Open a report; return the page, and what went wrong and was fetched."""
    problems, fetched = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(folder: Path):
            assert main([str(folder)]) == 0
            page = browser.new_page(color_scheme="light")
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: problems.append(message.text))
            page.on("request", lambda request: fetched.append(request.url))
            page.goto((folder / "report.html").as_uri())
            for mark in DRAWN:
                page.wait_for_selector(mark, state="attached")
            return page

        yield open_page
        browser.close()
    assert (problems, len(fetched)) == ([], 1)


def background(page) -> int:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_charts_are_drawn_light_and_dark_and_fit_a_narrow_window(opened, tmp_path):
    for loss in ("grpo", "cispo", "dapo", "gspo", "sapo"):  # more than fit beside each other
        made_arm(tmp_path, f"loss={loss}", seeds=3)
    page = opened(tmp_path)
    # The same rows by another measure of how far a run is.
    page.check("input[value=tokens]")
    page.wait_for_function("document.querySelector('#curves').textContent.includes('2k')")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    assert background(page) < 120 < 600 < light
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth <= 420")


def test_without_intervals_the_page_has_none_and_no_chart_complains(opened, tmp_path):
    for seed in range(2):
        for loss, reward in (("grpo", 0.5), ("cispo", 0.512)):
            name = f"{loss}-s{seed}"
            made_run(tmp_path / name, f"loss={loss}", seed=seed, steps=6, reward=reward + seed / 99)
    text = opened(tmp_path).text_content("body")
    assert not re.search("95 %|10,000 draws|grey band|P\\(better\\)", re.sub("<.*?>", "", text))
