"""Rules that find their learning rate."""
