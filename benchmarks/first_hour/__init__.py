"""Measure in an hour on a GPU what was only estimated without one (benchmarks/first_hour.sh)."""
