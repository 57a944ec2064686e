"""Compare runs with confidence intervals: python report.py outputs/sweeps/<time>"""

import sys

from lab.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
