"""Judge published claims at the size of the tiny policy: each is a sweep with until=decided.

    python -m benchmarks.claims [NAME ...] [KEY=VALUE ...]      (make claims)

claims/<name>.yaml has the claim, its source, the two arms and the smallest effect. The second arm
is compared with the first one on held-out questions. A claim that is judged is not played again,
and a stopped one is resumed, also with more hours: benchmarks.claims NAME until.max_hours=3.
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from envs.user_code import ROOT
from lab.report.statistics import OPEN

CLAIMS, RESULTS = ROOT / "claims", Path("outputs") / "claims"
HOLDS, FAILS, UNDECIDED = "holds here", "does not hold at this size", "open"


def judged(expected: str, decision: str) -> str:
    """Return the judgement of a claim whose second arm got this decision of docs/report.md."""
    return {OPEN: UNDECIDED, expected: HOLDS}.get(decision, FAILS)


def line(name: str, folder: Path) -> str:
    """Return a line of the table: the judgement, the difference with its interval, the claim."""
    text = (CLAIMS / f"{name}.yaml").read_text()
    claim = yaml.safe_load(text)["claim"]
    try:
        report = json.loads((folder / "report.json").read_text())
        (arm,) = (one for one in report["arms"] if one["run"] != report["baseline"])
        value, low, high = (arm["difference"][key] for key in ("value", "low", "high"))
        found = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
    except (OSError, LookupError, ValueError, TypeError):  # not played, or without an interval
        return f"{'not judged':28} {'':24} {name}"
    question = text.partition("\n")[0].lstrip("# ")
    return (
        f"{judged(claim['expected'], arm['decision']):28} {found:24} {question} {claim['source']}"
    )


def main(words: list[str]) -> int:
    """Play the named claims, or all, and print the table of all."""
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    every = sorted(path.stem for path in CLAIMS.glob("*.yaml"))
    if unknown := set(names) - {*every}:
        print(f"{', '.join(sorted(unknown))}: choose from {', '.join(every)}")
        return 2
    command = [sys.executable, str(ROOT / "train.py"), "--config-dir", str(CLAIMS)]
    for name in names or every:
        subprocess.run([*command, "--config-name", name, *overrides], check=False)
    print("\n".join(line(name, RESULTS / name) for name in every))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
