"""The faults, the moments at which they occur, and the outcomes that are allowed.

end       the run reaches max_steps although the fault occurred
message   the run ends with status 1 and one message
stopped   the run ends early, as asked or because its supervisor was killed
"""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

MOMENTS = ("start", "generation", "push", "checkpoint", "evaluation", "end")
LATER = MOMENTS[1:]
END, MESSAGE, STOPPED = {"end"}, {"message"}, {"stopped"}
NEVER = 10**9
_INT, _TERM = signal.SIGINT, signal.SIGTERM


@dataclass(frozen=True)
class Fault:
    name: str
    # The allowed outcomes. A fault at the moment "start" may always end the run with a message, and
    # one at the moment "end" may come too late.
    outcomes: set[str]
    moments: Sequence[str] = MOMENTS
    victim: str = ""  # process that gets the signals
    signals: Sequence[float] = ()  # signals, and seconds to wait between them
    damage: str = ""  # what happens to the files of the run (see running.py)
    engine: Sequence[dict[str, object]] = ()  # of tests/support/engine_faults.py, from the start on
    overrides: Sequence[str] = ()  # of the run, from the start on
    rejects: bool = False  # whether groups become unscorable, so their examples are not trained


def _on_every_process() -> list[Fault]:
    """Return KILL, TERM, and STOP for 3 s, of every process of the tree."""
    kill, term, pause = (signal.SIGKILL,), (_TERM,), (signal.SIGSTOP, 3.0, signal.SIGCONT)
    ends = {"inference": END, "rollouts": MESSAGE, "trainer.rank0": MESSAGE}
    ends |= {"supervisor": STOPPED, "reaper": END}
    asked = ends | {"rollouts": STOPPED, "trainer.rank0": STOPPED}
    return [
        *(Fault(f"KILL {name}", of, victim=name, signals=kill) for name, of in ends.items()),
        *(Fault(f"TERM {name}", of, victim=name, signals=term) for name, of in asked.items()),
        *(Fault(f"STOP {name} for 3 s", END, victim=name, signals=pause) for name in ends),
    ]


def _answering(name: str, outcomes: set[str], times: int, **engine: object) -> Fault:
    """Return a fault of the answers to requests, from the ninth on."""
    faults = [{"at": 9, "times": times, **engine}]
    return Fault(name, outcomes, ["generation"], engine=faults, rejects=times == NEVER)


def _playing(name: str, fault: str) -> Fault:
    overrides = ["env._target_=tests.support.faulty.FaultyReversal"]
    overrides += [f"+env.fault={fault}", "sampler.rollout_timeout=2"]
    return Fault(name, END, ["generation"], overrides=overrides, rejects=True)


def _pushing(name: str, outcomes: set[str], at: int, *overrides: str, **engine: object) -> Fault:
    faults = [{"path": "/update_weights", "at": at, **engine}]
    return Fault(name, outcomes, ["push"], engine=faults, overrides=overrides)


FAULTS = [
    *_on_every_process(),
    Fault("Ctrl-C", STOPPED, victim="supervisor", signals=(_INT,)),
    Fault("Ctrl-C twice", STOPPED, victim="supervisor", signals=(_INT, 0.3, _INT)),
    Fault("TERM supervisor twice", STOPPED, victim="supervisor", signals=(_TERM, 0.3, _TERM)),
    Fault("full disk", MESSAGE, LATER, damage="fill the disk"),
    Fault("read-only checkpoint folder", MESSAGE, LATER, damage="make checkpoints read-only"),
    Fault("socket of vLLM removed", END, LATER, damage="remove the socket"),
    _answering("vLLM answers 500 three times", END, 3, fault="Status", status=500),
    # A group may use up its retries before 32 requests in a row have failed.
    _answering("vLLM answers 500 for ever", MESSAGE, NEVER, fault="Status", status=500),
    _answering("vLLM answers half a body three times", END, 3, fault="CutShort"),
    _answering("vLLM answers garbage three times", END, 3, fault="Garbage"),
    _answering("vLLM answers garbage for ever", MESSAGE, NEVER, fault="Garbage"),
    # A restarted vLLM counts its pushes again, and gets three.
    _pushing("vLLM ends at a push", END, 5, fault="Exit", path="/start_weight_update"),
    _pushing("vLLM refuses every push", MESSAGE, 3, fault="Status", status=500, times=NEVER),
    _pushing("vLLM never answers a push", MESSAGE, 3, "trainer.wait_timeout=8",
             "sampler.rollout_timeout=5", fault="Hang", seconds=600, times=NEVER),
    Fault("vLLM never answers three requests", END, ["generation"],
          engine=[{"fault": "Hang", "seconds": 600, "at": 9, "times": 3}],
          overrides=["sampler.rollout_timeout=4"], rejects=True),
    _playing("slow environment", "slow"),
    _playing("hanging environment", "hang"),
    _playing("environment raises", "raise"),
    _playing("environment returns NaN", "not-a-number"),
    Fault("loss is NaN once", END, ["generation"],
          overrides=["loss._target_=tests.support.faulty.nan_once"]),
    Fault("loss is NaN for ever", MESSAGE, ["generation"],
          overrides=["loss._target_=tests.support.faulty.nan_from_then_on"]),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    number: int
    fault: Fault
    moment: str
    replicas: int
    step: int  # the fault occurs at the first such moment after so many steps

    @property
    def allowed(self) -> set[str]:
        """The outcomes that this case may have."""
        late = END if self.moment == "end" else set()
        return self.fault.outcomes | late | (MESSAGE if self.moment == "start" else set())

    @property
    def key(self) -> str:
        """The name of the case in the file of results."""
        return f"{self.number} {self.fault.name}, {self.moment}, {self.replicas} vLLM"

    def write_engine_faults(self, path: Path) -> None:
        """Write the faults of the scripted engine, and delays that make the moments longer."""
        slow = {"fault": "Hang", "seconds": 0.1, "times": NEVER}
        slow_push = {**slow, "seconds": 0.3, "path": "/start_weight_update"}
        path.write_text(json.dumps([*self.fault.engine, slow, slow_push]))


def cases(num_runs: int, seed: int) -> list[Case]:
    """Return the cases of a campaign: each (fault, moment) once in random order, then again."""
    rng, drawn = Random(seed), []
    pairs = [(fault, moment) for fault in FAULTS for moment in fault.moments]
    while len(drawn) < num_runs:
        for fault, moment in rng.sample(pairs, len(pairs)):
            number = len(drawn)
            drawn.append(Case(number, fault, moment, rng.choice((1, 1, 2)), rng.randint(1, 4)))
    return drawn[:num_runs]


def real_cases(num_runs: int, seed: int) -> list[Case]:
    """Return cases in which the only vLLM is killed once, some time after a moment begins."""
    rng, drawn = Random(seed), []
    longest = {"start": 30.0, "generation": 1.0, "push": 0.2, "evaluation": 1.0}  # seconds
    while len(drawn) < num_runs:
        for moment in rng.sample(list(longest), len(longest)):
            signals = (round(rng.uniform(0, longest[moment]), 2), signal.SIGKILL)
            fault = Fault("KILL the real vLLM", END, victim="inference", signals=signals)
            drawn.append(Case(len(drawn), fault, moment, 1, rng.randint(1, 4)))
    return drawn[:num_runs]
