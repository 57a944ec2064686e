"""Execution of the policy's code in processes that the kernel confines."""
