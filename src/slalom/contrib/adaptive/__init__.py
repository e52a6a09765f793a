"""Rules that descend from Adam."""
