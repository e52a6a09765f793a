"""Adam and the rules that descend from it."""
