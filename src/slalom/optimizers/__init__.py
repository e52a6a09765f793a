"""The recipes: functions that return chains."""

from .first_order import (
    adam as adam,
    adamw as adamw,
    lion as lion,
    rmsprop as rmsprop,
    sgd as sgd,
)
from .large_batch import (
    fromage as fromage,
    lamb as lamb,
    lars as lars,
)
