"""Sweeps that a person can rely on: jobs that are known again, slots side by side, one screen."""
