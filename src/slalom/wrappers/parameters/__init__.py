"""Wrappers that write the parameters, or keep others to evaluate."""
