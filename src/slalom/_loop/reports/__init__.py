"""Reports about an optimizer, before and during training."""
