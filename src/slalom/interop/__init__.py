"""Slalom's transforms in code for Optax, and Optax's in Slalom.

Optax is imported when one of these functions is called: `pip install optax`.
"""

from ._from_optax import from_optax as from_optax
from ._state import (
    ToOptaxState as ToOptaxState,
    eval_params as eval_params,
    hyperparams as hyperparams,
    metrics as metrics,
    with_hyperparams as with_hyperparams,
)
from ._to_optax import to_optax as to_optax
