"""A campaign of faults in whole runs with the scripted engine: python -m tests.faults."""
