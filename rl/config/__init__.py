"""What a run is asked for: its schema, the check, the rules. No torch."""
