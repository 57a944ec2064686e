"""Package that executes the policy's code in processes without access to the machine."""
