"""Look at what a run said and what training did with it: an index, a page, one file to mail."""
