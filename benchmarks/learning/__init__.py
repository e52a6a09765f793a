"""How fast the optimizers learn: real, small tasks, and the same search for a learning rate."""
