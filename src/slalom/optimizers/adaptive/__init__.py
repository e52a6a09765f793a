"""Adam and what descends from it, ready to use."""
