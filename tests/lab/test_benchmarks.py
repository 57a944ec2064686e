"""Benchmarks that use reports: the stored baseline, and the claims of papers in claims/."""

import json
from functools import partial

import pytest
import yaml

from benchmarks import baseline
from benchmarks.claims import CLAIMS
from rl.runtime.folder import RunFolder
from tests.support.composing import check_all, composed
from tests.support.finished_runs import made_arm


@pytest.mark.parametrize(("last", "difference"), [(20, -0.2), (10, -0.1)])
def test_code_that_learns_less_is_worse_at_the_last_version_that_both_have(
    last, difference, tmp_path
):
    made_arm(tmp_path / "before", "code=a")
    main = partial(baseline.main, file=tmp_path / "stored" / "default.json")
    assert main([str(tmp_path / "before"), "store"]) == 0
    for folder in made_arm(tmp_path / "now", "code=b", gain=-0.2, max_steps=last):
        if last == 10:
            RunFolder(folder).evaluation_of(20).rename(folder / "gone")
    assert main([str(tmp_path / "now")]) == 1
    record = json.loads((tmp_path / "now" / "baseline.json").read_text())
    (today,) = [arm for arm in record["arms"] if arm["run"] == "today"]
    assert (record["judged"], today["decision"]) == (f"version {last}", "worse")
    assert today["difference"]["value"] == pytest.approx(difference, abs=0.03)


@pytest.mark.parametrize("name", sorted(path.stem for path in CLAIMS.glob("*.yaml")))
def test_every_claim_compares_two_runs_that_could_start(name, tmp_path):
    content = yaml.safe_load((CLAIMS / f"{name}.yaml").read_text())
    assert content["claim"]["expected"] in ("better", "equal")
    assert content["hydra"]["sweep"]["dir"].endswith(f"/claims/{name}")
    ((key, values),) = content["hydra"]["sweeper"]["params"].items()
    assert len(values.split(",")) == 2
    for value in values.split(","):
        arm = composed(f"{key}={value}", f"output_dir={tmp_path}", sweep=name, folder=CLAIMS)
        arm.pop("until")  # of the sweep, not of a job
        assert "claim" not in arm
        check_all(arm)
