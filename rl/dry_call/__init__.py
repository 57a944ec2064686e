"""What a user can write is called once with made-up values, before a run starts."""
