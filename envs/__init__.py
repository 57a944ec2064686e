"""Environments and what they share. Nothing here imports torch or the `rl` package."""
