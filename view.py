"""Look at a run: python view.py outputs/<run>

`python view.py` says what else it can do, and lists the runs in outputs/.
"""

import sys

from rl.viewer.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
