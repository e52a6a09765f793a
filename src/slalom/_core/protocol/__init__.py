"""What every transform implements, and what transforms are made of. Read `transform.py` first."""
