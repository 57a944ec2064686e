"""Plays environments that were written for the classic API or the API v1 of `verifiers`."""
