"""Per-example gradients, noise, and monitors."""
