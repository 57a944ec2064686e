"""Your own ideas, one per file. A YAML file in conf/ makes each a choice of train.py."""
