"""The recipes: functions that return chains."""

from .first_order import (
    adam as adam,
)
from .first_order import (
    adamw as adamw,
)
from .first_order import (
    lion as lion,
)
from .first_order import (
    rmsprop as rmsprop,
)
from .first_order import (
    sgd as sgd,
)
