"""Wrappers that decide which gradients a transform sees, and when."""
