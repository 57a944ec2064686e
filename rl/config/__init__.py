"""Package that defines and checks the configuration of a run. It does not import torch."""
