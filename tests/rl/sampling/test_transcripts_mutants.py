"""Which lines of a teacher's file are imitated."""

import json

import pytest

from rl.sampling.transcripts import read_conversations


@pytest.mark.parametrize(("least", "count"), [(None, 3), (0.4, 2), (0.5, 2), (0.6, 1)])
def test_a_line_with_just_the_least_reward_is_taken_and_one_without_is_not(least, count, tmp_path):
    path = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": talk, "reward": reward} for reward in (0.5, 1.0, None)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_conversations(str(path), least)) == count
