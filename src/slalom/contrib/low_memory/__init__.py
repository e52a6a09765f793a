"""Adam with less state."""
