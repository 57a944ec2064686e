"""Package of the training system: configuration, processes, sampling, training, weight push."""
