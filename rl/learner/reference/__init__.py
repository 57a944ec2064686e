"""What divergence is measured from, or who teaches: frozen, and loaded only where it is read."""
