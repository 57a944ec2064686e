"""Sweeps that add seeds until their arms are decided."""

import json
from itertools import islice
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from scipy import stats

from lab.sweeps import until
from lab.sweeps.until import Progress
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.sweep_folder import SWEEP_VARIABLE, SweepFolder, identity
from tests.support.golden import golden
from tests.support.sweep_app import SweepApp

ARMS = [["rate=0.5"], ["rate=0.7"], ["rate=0.505"]]
JOBS = ["--multirun", "rate=0.5,0.7,0.505", "noise=0.03", "+until.smallest_effect=0.1"]
JOBS += ["hydra.sweep.dir=outputs/x"]


@pytest.fixture
def app(tmp_path):
    return SweepApp(tmp_path)


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "sweep").mkdir()
    return SweepFolder(tmp_path / "sweep")


def play_seeds(sweep, arm, seeds, reward):
    """Write the runs and the records of jobs that are done, one after the other in 60 s each."""
    for seed in seeds:
        number, record = sweep.claim([*arm, f"seed={seed}"])
        folder = RunFolder(sweep.path.parent / f"run-{number}")
        MetricsFile(folder).append(0, {"train/reward": reward + (seed * 5 % 7) / 100})
        folder.config.write_text(f"max_steps: 1\nrate: {arm[0]}\n")
        record.folder, record.state, record.error, record.max_steps = str(folder), "done", None, 1
        record.started, record.ended = 1000.0 + number * 60, 1060.0 + number * 60
        sweep.write(number, record)


def next_of(progress, tried=(), number=4):
    return [" ".join(job) for job in islice(progress.next_jobs(tried), number)]


def test_the_first_seed_of_all_arms_comes_first_and_the_price_assumes_how_seeds_differ(sweep):
    progress = Progress(sweep, ARMS, 1, 0.1)
    assert progress.comparison is None
    first = [f"{arm} seed=0" for (arm,) in ARMS]
    assert next_of(progress) == [*first, "rate=0.5 seed=1"]
    assert next_of(progress, {identity(["rate=0.5", "seed=0"])})[0] == first[1]
    # With so few seeds the level is the raised one, 0.025 / (20 n (n + 1)).
    p = 0.025 / 20
    radii = [stats.t.isf(p / n / (n + 1), 2 * n - 2) * 0.02 * (2 / n) ** 0.5 for n in (4, 5)]
    assert radii[0] > 0.1 > radii[1]
    needed = "Probably still needed: 15 runs (5 seeds of each arm, if the scores"
    assert needed in progress.text()


def test_jobs_at_the_same_time_count_once(sweep):
    spans = ((0, 60), (10, 40), (20, 60), (100, 130))  # nothing runs between 60 and 100
    play_seeds(sweep, ARMS[0], range(4), 0.5)
    for (number, record), span in zip(sweep.records().items(), spans, strict=True):
        record.started, record.ended = 1000.0 + span[0], 1000.0 + span[1]
        sweep.write(number, record)
    assert Progress(sweep, ARMS, 3, 0.1).timings == (40.0, 90.0)
    number, failed = sweep.claim([*ARMS[0], "seed=3"])
    failed.state = "failed"  # its 30 s are spent, too
    sweep.write(number, failed)
    assert Progress(sweep, ARMS, 3, 0.1).timings == (pytest.approx(130 / 3), 90.0)


def test_an_arm_that_seeds_cannot_decide_gets_its_lost_runs_alone(sweep):
    for arm in ARMS:
        play_seeds(sweep, arm, range(3), 0.5)
    for lost in (["rate=0.5", "seed=2"], ["rate=0.7", "seed=1"], ["rate=0.505", "seed=0"]):
        number, record = sweep.claim(lost)
        record.state = "failed"
        sweep.write(number, record)
    progress = Progress(sweep, ARMS, 1, 0.1)
    progress.__dict__["seeds_needed"] = {1: float("inf")}
    assert next_of(progress) == ["rate=0.5 seed=2", "rate=0.7 seed=1"]  # also of the baseline
    _, second = (identity(job.split()) for job in next_of(progress))
    assert next_of(progress, {second}) == ["rate=0.5 seed=2"]
    progress.__dict__["seeds_needed"] = {1: float("inf"), 2: 5.0}
    more = ["rate=0.505 seed=0", "rate=0.5 seed=2", "rate=0.5 seed=3"]
    assert next_of(progress, number=4) == ["rate=0.7 seed=1", *more]


@pytest.mark.parametrize(
    ("kind", "most", "num_slots", "sizes"),
    [(object, None, 0, [3]), (object, None, 4, [4]), (object, 2, 4, [2, 2]),
     (until.BasicLauncher, None, 4, [1, 1, 1])],
    ids=["arms", "slots", "max_batch_size", "in sequence"],
)  # fmt: skip
def test_a_launch_has_as_many_jobs_as_run_in_parallel_and_none_follows_three_failures(
    kind, most, num_slots, sizes, sweep, monkeypatch
):
    launched = []

    class Failing(kind):
        def launch(self, jobs, initial_job_idx):
            assert initial_job_idx == sum(map(len, launched))
            launched.append(jobs)
            return [JobReturn(status=JobStatus.FAILED, _return_value=KeyError("x")) for _ in jobs]

    monkeypatch.setenv(SWEEP_VARIABLE, str(sweep.path))
    sweep.write_info({"slots": [{}] * num_slots})
    # Hydra loads its plugins again when it composes, so __init__ may be that of another class.
    sweeper = object.__new__(until.UntilDecided)
    sweeper.max_batch_size = most
    sweeper.config, sweeper.launcher = SimpleNamespace(until={"smallest_effect": 0.1}), Failing()
    monkeypatch.setattr(until, "parse_jobs", lambda _: ARMS)
    with pytest.raises(KeyError, match="x"):
        sweeper.sweep([])
    assert [len(jobs) for jobs in launched] == sizes
    assert len({identity(job) for jobs in launched for job in jobs}) == sum(sizes)
    assert sweep.read_info()["progress"].startswith("0 of 2 arms decided; open: ")
    assert sweep.read_info()["baseline"] == "rate=0.5"


def test_a_sweep_plays_until_all_arms_are_decided_and_then_nothing(app):
    status, output = app.run(*JOBS)
    assert status == 0, output
    calls = [line.split()[0] for line in app.calls()]
    assert calls.count("rate=0.7") == 3 <= calls.count("rate=0.505") <= 6
    assert calls[:3] == ["rate=0.5", "rate=0.7", "rate=0.505"]
    assert output.count("arms decided; open") == len(calls)  # the price, before each run
    report = json.loads((app.folder / "outputs" / "x" / "report.json").read_text())
    decisions = {arm["name"]: arm["decision"] for arm in report["arms"]}
    assert decisions["rate=0.7"] == "better"
    assert decisions["rate=0.505"] == "equal within 0.1"
    done = f"2 of 2 arms decided by {len(calls)} runs in "
    assert any(done in note for note in report["notes"])
    status, output = app.run(*JOBS)
    assert (status, app.calls()) == (0, []), output
    assert done in output
    status, output = app.run("--multirun", "rate=0.7,0.5", "seed=0", JOBS[2], JOBS[-1])
    again = json.loads((app.folder / "outputs" / "x" / "report.json").read_text())
    assert (status, again["arms"]) == (0, report["arms"]), output  # by the same rule


def test_an_arm_without_scores_gets_no_more_seeds_and_other_recorded_arms_do_not_matter(sweep):
    number, failed = sweep.claim(["rate=0.1", "seed=0"])  # an arm of an earlier command
    failed.state = "failed"
    sweep.write(number, failed)
    for arm, reward in zip(ARMS, (0.5, float("nan"), 0.55), strict=True):
        play_seeds(sweep, arm, range(3), reward)
    for arms in ([[*arm, "run_name=x"] for arm in ARMS], ARMS):
        progress = Progress(sweep, arms, 1, 0.1)
        assert list(map(len, progress.done_by_arm)) == [3, 3, 3]
    assert progress.comparison is not None
    assert progress.comparison.baseline.arm.name == "rate=0.5"
    assert progress.seeds_needed[1] == float("inf")
    assert not any("rate=0.7" in job for job in next_of(progress))


def test_a_sweep_ends_if_the_done_runs_of_the_first_arm_have_no_score(app):
    status, output = app.run("--multirun", "rate=nan,0.7", *JOBS[2:])
    assert (status, len(app.calls())) == (0, 1)
    assert "rate=nan has neither an evaluation nor a training reward" in output


def test_a_single_arm_is_refused_before_any_run(app):
    status, output = app.run("--multirun", "rate=0.5", "+until.smallest_effect=0.1")
    assert (status, app.calls()) == (2, [])
    assert "until=decided compares arms: give a key two values" in output


def test_what_a_sweep_that_adds_seeds_says_and_starts_next(sweep):
    """The text, the next jobs and the seeds needed, from no run to decided arms and spent hours."""
    found = {}

    def describe(name, arms=ARMS, size=2, effect=0.1, **options):
        one = Progress(sweep, arms, size, effect, **options)
        needed = {str(key): value for key, value in one.seeds_needed.items()}
        found[name] = [one.text(), next_of(one, number=7), needed, one.timings, one.is_time_spent]

    describe("nothing")
    describe("a small effect", effect=0.02, size=1)
    play_seeds(sweep, ARMS[0], range(4), 0.5)
    describe("the baseline alone")
    for arm, reward in zip(ARMS[1:], (0.7, 0.56), strict=True):
        play_seeds(sweep, arm, range(3), reward)
    describe("some seeds")
    describe("spent", max_hours=0.18)
    describe("not spent", max_hours=0.19)
    describe("every arm is decided", arms=ARMS[:2])
    describe("a smaller effect", effect=0.005)
    golden("sweeps/until", found)
