"""The training step: gradient and optimizer step, compiled as one program."""
