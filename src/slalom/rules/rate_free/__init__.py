"""Rules that find their learning rate, or need no schedule."""
