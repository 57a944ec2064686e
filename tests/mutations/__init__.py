"""Put plausible mistakes into a copy of the code, one at a time, and see which tests fail.

    python -m tests.mutations                          every mistake
    python -m tests.mutations --select "objective*"    mistakes by name

This is too slow for the suite. `tests/test_mutations.py` checks only that every mistake still
applies to the code.
"""
