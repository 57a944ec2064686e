"""Whether a killed and resumed run equals the uninterrupted one: python -m tests.exact_resume."""
