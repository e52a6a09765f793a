"""Rules that keep less than Adam."""
