"""Environments and their shared modules. No module here imports torch or the package `rl`."""
