"""A matrix and three gradients, for which the authors' equations give numbers; and random ones."""

import jax.numpy as jnp
import numpy as np

START = np.array([[0.5, -1.0, 1.5], [2.0, 0.25, -0.75]])
GRADS = np.array(
    [
        [[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]],
        [[0.5, -1.0, 2.0], [1.0, 1.0, -0.5]],
        [[-1.0, 0.5, 1.0], [2.0, -0.5, 1.0]],
    ]
)


def drawn_matrix(shape, steps, dtype=float):
    """A random matrix, and a gradient for each step."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal(shape), random.standard_normal((steps, *shape))
    return tuple(jnp.asarray(x, dtype) for x in drawn)
