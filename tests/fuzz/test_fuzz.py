"""Some damaged inputs for each reader, and the cases whose errors were once not documented.

`python -m tests.fuzz` reads more.
"""

import asyncio
import json
import socket

import msgspec
import pytest

from envs.episode import Episode, Example
from envs.tools import Toolbox
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.records import RankBatch
from rl.rollouts.__main__ import dispatcher_state
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, read_rows, write_lines
from rl.trainer.rollouts_link import RolloutsLink
from rl.wire import HEADER, Call, pack, unpack
from tests.fuzz.cases import Limits, findings
from tests.fuzz.readers import COOLER, READERS, look
from tests.support.composing import composed

CASES = {"config": 60, "tools": 300, "tokens": 300, "checkpoint": 300, "wire": 500}
FOUND = {  # cases that were findings: a class without a key that rl/ reads; a seek to a wrong place
    "config": [692, 13750],
    "checkpoint": [441],
}
NESTED: list = []
for _ in range(3000):
    NESTED = [NESTED]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_read_or_refused_by_the_documented_error(name, tmp_path):
    reader = READERS[name](tmp_path)
    numbers = [*range(CASES[name]), *FOUND.get(name, [])]
    with Limits(seconds=60.0) as limits:
        assert list(findings(reader, name, 0, numbers, limits)) == []


@pytest.mark.parametrize(
    ("overrides", "group", "values"),
    [
        ([], "loss", {"clip_low": {}, "clip_high": {}}),
        ([], "deepspeed", {"x": NESTED}),
        ([], "env", {"words": NESTED}),
        ([COOLER], "sampler", {"_target_": 1.5}),
        ([COOLER], "", {"max_steps": "many"}),
        ([COOLER], "", {"max_steps": -(10**30)}),
    ],
    ids=["clip", "deepspeed", "env", "target", "text", "negative"],
)
def test_a_wrong_configuration_is_a_config_error(overrides, group, values):
    config = composed(*overrides)
    (config[group] if group else config).update(values)
    with pytest.raises(ConfigError):
        check(config)


def test_a_tool_name_that_is_no_text_is_an_answer_for_the_policy():
    call = {"function": {"name": NESTED, "arguments": {}}}
    episode = Episode(Example(0, "e", []), [])
    answer = asyncio.run(Toolbox((look,), timeout=60.0).answer(call, episode))
    assert answer["content"].startswith("Error: there is no tool with a list as name.")


def test_a_message_with_a_text_that_is_not_utf8_or_a_wrong_dtype_is_a_decode_error():
    with pytest.raises(msgspec.DecodeError, match="is damaged: 'utf-8'"):
        unpack(b"\x81\xa4what\xa1\xff", Call)
    array = ["9" * 5000, [0], b""]
    message = pack({"step": 0, "micro_batches": [], "rewards": array})
    with pytest.raises(msgspec.DecodeError, match="is damaged: Exceeds the limit"):
        unpack(message, RankBatch)


@pytest.mark.parametrize("count", [2**62, 2**64 - 1])
def test_a_frame_that_does_not_fit_into_memory_is_an_error_of_the_run(count, tmp_path):
    link = RolloutsLink(RunFolder(tmp_path), 0)
    link._socket, other = socket.socketpair()
    with link._socket, other:
        link._socket.settimeout(5.0)
        other.sendall(HEADER.pack(count))
        with pytest.raises(RunFailed, match="does not fit into memory"):
            link.state()


STATE = {"step": 4, "rollouts": {"pending": [], "places": []}}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"4", b'{"step": 4}', b"\xff", b"[" * 9000, b'{"step": [], "rollouts": {}}'),
        json.dumps({**STATE, "rollouts": []}).encode(),
        json.dumps({**STATE, "rollouts": {"pending": 7}}).encode(),
    ],
)
def test_a_damaged_state_of_a_checkpoint_is_named(content, tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoint(4).mkdir(parents=True)
    folder.state_of(folder.checkpoint(4)).write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000004/state\.json is damaged.*: delete its check"):
        dispatcher_state(folder.resume_point())


def test_a_token_file_that_is_damaged_or_of_another_kind_is_named(tmp_path):
    from pyarrow import parquet

    folder = RunFolder(tmp_path)
    path = folder.tokens_of(5, "rollouts")
    write_lines(path, Lines(["000000.0"], [0], [2], {"mask": [False, True], "mu": [0.0, 1.0]}))
    whole = path.read_bytes()
    assert len(read_rows(folder, 5)) == 1
    table = parquet.read_table(path)
    renamed = table.rename_columns(["row", "id", "a", "b"])
    for other in (table.drop(["id"]), table.drop(["mask"]), renamed):
        parquet.write_table(other, path)
        with pytest.raises(ValueError, match=r"step_000005\.\*\.parquet is damaged .*: delete the"):
            read_rows(folder, 5)
    for content in (whole[:-20], whole[20:], whole.replace(b"mask", b"m\xff\xfek")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"step_000005\.rollouts\.parquet is damaged"):
            read_rows(folder, 5)
