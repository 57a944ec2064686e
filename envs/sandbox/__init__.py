"""Package that runs the policy's code in processes that can only compute."""
