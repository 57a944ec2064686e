"""Which turn of a conversation found the pages that hold the answer."""

from collections.abc import Iterator, Sequence

from envs.messages import Message


def pages_found(messages: Sequence[Message], wanted: Sequence[str]) -> list[float]:
    """Return for each of the policy's turns the share of the wanted pages that its searches found.

    A page counts once, for the first turn whose search listed it, so that all turns together earn
    at most 1, and searching again earns nothing.

    Args:
        messages: of the conversation, from its first to its last turn.
        wanted: page ids; without any nothing can be found.

    """
    found: list[float] = []
    missing = set(wanted)
    for results in _searches(messages):
        news = missing & results
        missing -= news
        found.append(len(news) / len(wanted) if wanted else 0.0)
    return found


def _searches(messages: Sequence[Message]) -> Iterator[set[str]]:
    """The page ids that the searches of each turn listed."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or []
        answers = messages[i + 1 : i + 1 + len(calls)]  # in order; none where the episode ended
        yield {
            page
            for call, answer in zip(calls, answers, strict=False)
            if call["function"]["name"] == "search_pages" and answer["role"] == "tool"
            for page in str(answer["content"]).split("\n")
        }
