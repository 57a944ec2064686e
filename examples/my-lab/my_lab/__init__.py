"""Your own ideas, one per file. conf/ makes each of them a choice of train.py."""
