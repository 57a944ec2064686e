"""Damaged inputs for five readers: python -m tests.fuzz."""
