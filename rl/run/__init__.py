"""What all processes of a run share: folder, metrics, status, failures, children."""
