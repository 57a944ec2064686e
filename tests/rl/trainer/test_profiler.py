"""trainer.profile: the steps that are recorded."""

import gzip
import json

import torch

from rl.runtime.folder import RunFolder
from rl.trainer.profiler import start_profiler


def test_only_the_first_steps_after_the_skipped_one_are_profiled(tmp_path):
    run_folder = RunFolder(tmp_path)
    profiler = start_profiler(run_folder, rank=3, num_steps=1)
    assert profiler
    for _ in range(6):
        torch.ones(2).sum()
        profiler.step()
    profiler.stop()
    trace = json.loads(gzip.decompress(run_folder.profile_of(3).read_bytes()))
    assert "aten::sum" in run_folder.profile_of(3).with_name("rank3.txt").read_text()
    steps = {event.get("name") for event in trace["traceEvents"]}
    assert [n for n in range(7) if f"ProfilerStep#{n}" in steps] == [1]
