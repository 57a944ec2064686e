"""The configuration of a run: its schema, its checks and its rules. Imports no torch."""
