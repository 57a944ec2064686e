"""Plausible mistakes, put into a copy of the code one at a time: which tests notice them?

    python -m tests.mutations                          every mistake
    python -m tests.mutations --select "objective*"    some, by name
    python -m tests.mutations --resume                 only those without a result yet
    python -m tests.mutations --list                   what there is

Each result is a line of outputs/mutations.jsonl, written at once. Too slow for the suite;
`tests/test_mutations.py` sees to it that every mistake still fits the code.
"""
