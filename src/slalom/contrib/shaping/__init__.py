"""Bounds for weights and updates."""
