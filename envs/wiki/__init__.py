"""The wiki-search environment: its pages, its questions and its search tools."""
