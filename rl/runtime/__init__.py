"""Folder, metrics, status, failures and children: shared by all processes of a run."""
