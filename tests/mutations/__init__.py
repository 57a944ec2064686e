"""A campaign of mistakes in the code: python -m tests.mutations."""
