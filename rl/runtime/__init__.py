"""Modules that all processes share: files, metrics, statuses, failures, child processes."""
