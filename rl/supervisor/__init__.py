"""The process on the terminal: prepare, start, watch."""
