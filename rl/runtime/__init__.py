"""Modules that all processes of a run share: files, metrics, statuses, failures, children."""
