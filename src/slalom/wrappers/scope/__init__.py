"""Wrappers that change where a transform acts, and how its state is kept."""
