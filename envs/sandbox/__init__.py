"""Code that a policy wrote, in processes that the kernel confines."""
