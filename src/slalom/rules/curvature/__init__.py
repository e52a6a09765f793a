"""Rules that use the curvature of a loss."""
