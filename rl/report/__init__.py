"""What a person sees: the screen, the table of a sweep."""
