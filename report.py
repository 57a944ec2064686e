"""Compare runs with confidence intervals: python report.py outputs/sweeps/<time> baseline=loss=grpo

`python report.py --help` lists the keys; docs/report.md explains each number.
"""

import sys

from lab.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
