"""The recipes: functions that return chains."""

from .adam import adam as adam, adamw as adamw, nadam as nadam, nadamw as nadamw
from .first_order import rmsprop as rmsprop, sgd as sgd
from .sign import lion as lion
