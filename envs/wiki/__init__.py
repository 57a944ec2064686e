"""Package of the environment wiki-search: its pages, its questions and its search tools."""
