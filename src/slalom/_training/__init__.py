"""The training step: gradient, optimizer step and donation, compiled as one."""
