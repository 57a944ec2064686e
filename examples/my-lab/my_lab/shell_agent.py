"""An agent that needs no module of offbyone: each answer of the model is a shell command.

    task -> model -> command -> its output -> model -> ...       an answer "done" ends the episode

`env=shell-agent` starts this file once per episode. Any other program that asks the endpoint in
OPENAI_BASE_URL may replace it. Commands run without a sandbox, so train in a container.
"""

import json
import os
import subprocess
import sys
from urllib.request import Request, urlopen

TURNS = 4


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer to these messages."""
    request = Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main(task: str) -> None:
    messages = [{"role": "user", "content": task}]
    for _ in range(TURNS):
        command = ask(messages)
        if command.strip() == "done":
            break
        limits = {"capture_output": True, "text": True, "errors": "replace", "timeout": 5}
        shell = ["sh", "-c", command.replace("\0", "")]
        done = subprocess.run(shell, stdin=subprocess.DEVNULL, **limits)
        said = (done.stdout + done.stderr)[:60] or "ok"
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": said}]


if __name__ == "__main__":
    main(sys.argv[1])
