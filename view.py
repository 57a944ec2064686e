"""Show a run in the browser: python view.py outputs/<run>

`python view.py` prints all options and lists the runs in outputs/.
"""

import sys

from lab.viewer.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
