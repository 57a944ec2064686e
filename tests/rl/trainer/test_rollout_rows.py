"""Rollouts as rows of a table: bounded, one type a column, whatever an environment said."""

import json

from rl.runtime.folder import RunFolder
from rl.trainer.rollout_rows import rollout_rows


def write(folder, *messages):
    lines = [json.dumps({"id": str(i), "messages": m}) + "\n" for i, m in enumerate(messages)]
    folder.rollouts_of(0).write_text("".join(lines))


def test_long_text_is_cut_and_parts_of_content_are_shown(tmp_path):
    folder = RunFolder(tmp_path)
    parts = [{"type": "text", "text": "see"}]
    write(
        folder,
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "x" * 9999}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}],
    )
    first, second = rollout_rows(folder, 0, 2)
    assert first["prompt"] == f"user: {json.dumps(parts)}"
    assert len(first["answer"]) == 4004
    assert second["answer"] == "assistant: "
