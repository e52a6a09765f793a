"""From a small model and batch to large ones."""
