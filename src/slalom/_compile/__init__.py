"""How steps are compiled."""
