"""wiki-search: pages, the facts that they are made of, ways of finding them."""
