"""A matrix and three gradients: transcriptions of the equations of authors give their numbers."""

import numpy as np

START = np.array([[0.5, -1.0, 1.5], [2.0, 0.25, -0.75]])
GRADS = np.array(
    [
        [[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]],
        [[0.5, -1.0, 2.0], [1.0, 1.0, -0.5]],
        [[-1.0, 0.5, 1.0], [2.0, -0.5, 1.0]],
    ]
)
