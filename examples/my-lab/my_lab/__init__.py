"""Everything of one's own, one idea a file; conf/ makes each of them a choice of train.py."""
