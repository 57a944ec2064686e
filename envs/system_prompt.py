"""The first message of every episode, when the configuration and not the environment says it.

system_prompt: Answer in one word.                   a text
system_prompt: outputs/best/system_prompt.txt        a file that holds it: .txt or .md
system_prompt: ""                                    none, whatever the environment has
"""

from collections.abc import Sequence
from pathlib import Path

from envs.messages import Message

_FILES = (".txt", ".md")


def read_system_prompt(given: str) -> str:
    """Return the text, without the line breaks around it; ValueError where its file is none."""
    if "\n" in given or not given.endswith(_FILES):
        return given.strip()
    file = Path(given).expanduser()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"system_prompt={given}: cannot be read ({type(error).__name__}). What ends in .txt or "
            ".md names a file, from the folder you start in; end a text with a full stop"
        ) from error


def with_system_prompt(messages: Sequence[Message], text: str | None) -> list[Message]:
    """Return the messages, with the text in the place of a system message where there is one."""
    if text is None:
        return list(messages)
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [*([{"role": "system", "content": text}] if text else []), *rest]
