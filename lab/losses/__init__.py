"""Package behind compare_losses.py, which compares the gradients of losses on recorded batches."""
