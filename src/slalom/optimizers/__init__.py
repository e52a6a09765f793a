"""The recipes: functions that return chains."""

from .adam import (
    adam as adam,
    adamax as adamax,
    adamaxw as adamaxw,
    adamw as adamw,
    amsgrad as amsgrad,
    nadam as nadam,
    nadamw as nadamw,
)
from .adam_variants import adabelief as adabelief, radam as radam, yogi as yogi
from .first_order import rmsprop as rmsprop, sgd as sgd
from .sign import lion as lion
