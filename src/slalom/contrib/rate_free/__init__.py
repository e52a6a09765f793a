"""Rules that choose the learning rate."""
