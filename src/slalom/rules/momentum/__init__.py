"""Momentum, signs, and sums of squares."""
