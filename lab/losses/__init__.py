"""Compute losses on recorded batches, without a model, and compare their gradients."""
