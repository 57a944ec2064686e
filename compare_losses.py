"""Compute other losses on recorded batches: python compare_losses.py outputs/run loss=gspo,dapo"""

import sys

from lab.losses.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
