"""Rules for matrices."""
