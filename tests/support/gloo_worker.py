"""One worker of a vLLM that receives by gloo, told what to do line by line.

    python -m tests.support.gloo_worker <number>

{"connect": facts} and {"read": [mark, num_bytes]} are answered by a line each: ready, or the names,
dtypes and shapes of what came, or the error.
"""

import json
import sys
from typing import Any

from rl.weights.gloo import GlooReader


def answer(call: dict[str, Any], worker: int, readers: list[GlooReader]) -> Any:
    if "connect" in call:
        readers[:] = [GlooReader(worker, **call["connect"])]
        return "ready"
    mark, num_bytes = call["read"]
    read = readers[0].read(mark, num_bytes=num_bytes)
    return {name: [str(t.dtype), list(t.shape)] for name, t in read.items()}


if __name__ == "__main__":
    number, readers = int(sys.argv[1]), []
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), number, readers)
        except RuntimeError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)  # noqa: T201 read by the test
