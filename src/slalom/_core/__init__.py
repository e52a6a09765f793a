"""The protocol and what everything is made of. `transform.py` is the file to read first."""
