"""The objects of a training loop: a transform bound to a model, and the compiled training step."""
