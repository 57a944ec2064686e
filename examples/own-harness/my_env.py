"""The tools, the shared index and the reward of the experiment own-harness."""

import json
from pathlib import Path

from envs.episode import Episode
from envs.rewards import exact, final_text


def load_index(*, path: str) -> dict[str, str]:
    """Return title -> text of the pages in a JSON file. A run calls this function once."""
    return json.loads(Path(path).read_text())


def search(query: str, index: dict[str, str]) -> str:
    """Search the encyclopedia.

    Args:
        query: a word of the page that you need.
    """
    found = [f"{title}: {text}" for title, text in index.items() if query.lower() in title.lower()]
    return "\n".join(found) or "no page has this word in its title"


def exact_answer(episode: Episode) -> float:
    """Return 1 if the last message equals the answer of the example, else 0."""
    return exact(final_text(episode), [str(episode.example.info["answer"])])
