"""References: what the divergence is measured from, and teachers."""
