"""Put plausible mistakes into a copy of the code, one at a time, and see which tests fail.

    python -m tests.mutations                          every mistake
    python -m tests.mutations --select "objective*"    mistakes by name
    python -m tests.mutations --resume                 mistakes without a result
    python -m tests.mutations --list                   print all mistakes

Each result is appended to outputs/mutations.jsonl at once. This is too slow for the suite, so
`tests/test_mutations.py` only checks that every mistake still applies to the code.
"""
