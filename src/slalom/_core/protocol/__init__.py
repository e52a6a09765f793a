"""The protocol of transforms, and its building blocks. Read `transform.py` first."""
