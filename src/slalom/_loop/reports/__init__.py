"""What an optimizer says of itself, before and during training."""
