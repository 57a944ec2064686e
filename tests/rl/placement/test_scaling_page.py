"""docs/scaling.md says of every placement what the function gives."""

import re
from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.placement.placement import placement
from rl.runtime.devices import Host
from tests.support.composing import composed

PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
ROW = re.compile(r"^\| (\d+) x (\d+) \|(.*)\| (\d+) \| (\d+) x (\d+) \| [\w ]+ \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:3]) for row in ROWS])
def test_a_placement_is_what_the_page_says(row):
    hosts, gpus, command, ranks, replicas, group = row
    names = tuple(map(str, range(int(gpus))))
    machines = [Host(devices=names, cores=16, cpus=32)] * int(hosts)
    overrides = [word for word in command.strip(" `").split() if not word.startswith("cluster=")]
    plan = placement(Run.of(composed("run_name=x", *overrides)), machines)
    assert (len(plan.ranks), len(plan.inference)) == (int(ranks), int(replicas))
    assert {len(place.devices) for place in plan.inference} == {int(group)}


def test_the_page_has_one_gpu_to_sixty_four():
    sizes = {int(hosts) * int(gpus) for hosts, gpus, *_ in ROWS}
    assert sizes >= {0, 1, 2, 4, 8, 16, 32, 64}
