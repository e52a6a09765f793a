"""Tools around training: the learning rate range test, sweeps, and plots of metrics."""
