"""A transform bound to the parameters of one model, and the compilation of its steps."""
