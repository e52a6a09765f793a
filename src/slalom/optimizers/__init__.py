"""The recipes: functions that return chains."""

from .first_order import (
    adam as adam,
    adamw as adamw,
    lion as lion,
    rmsprop as rmsprop,
    sgd as sgd,
)
from .gradient import (
    noisy_sgd as noisy_sgd,
    optimistic_adam_v2 as optimistic_adam_v2,
    optimistic_gradient_descent as optimistic_gradient_descent,
    polyak_sgd as polyak_sgd,
)
from .large_batch import (
    fromage as fromage,
    lamb as lamb,
    lars as lars,
)
