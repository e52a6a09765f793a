"""The protocol of transforms and the engine that runs them. Read `transform.py` first."""
