"""Hydra in, plain configuration out, errors in a sentence."""
