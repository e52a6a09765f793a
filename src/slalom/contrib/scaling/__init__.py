"""Transfers hyperparameters from a small model and batch to large ones."""
