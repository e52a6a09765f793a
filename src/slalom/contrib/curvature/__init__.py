"""Estimates of the Hessian."""
