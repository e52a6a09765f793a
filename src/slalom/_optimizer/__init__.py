"""The optimizer: a transform bound to the parameters of one model."""
