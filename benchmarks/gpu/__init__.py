"""Slalom on one GPU."""
