"""The optional dependency."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optax import (
        GradientTransformation as GradientTransformation,
        GradientTransformationExtraArgs as GradientTransformationExtraArgs,
        MultiSteps as MultiSteps,
    )
else:
    # Types are checked at run time too, also where Optax is missing.
    GradientTransformation = GradientTransformationExtraArgs = MultiSteps = Any


def import_optax(who: str) -> Any:
    """The module `optax`, for the function `sl.interop.{who}`."""
    try:
        return importlib.import_module("optax")
    except ImportError as error:
        raise ImportError(f"`sl.interop.{who}` needs Optax: pip install optax.") from error
