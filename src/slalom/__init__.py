"""Slalom: composable, typed, compiled optimizers for JAX and Equinox."""

import contextlib as _contextlib
import os as _os

if _os.environ.get("SLALOM_TYPECHECK", "0") not in ("", "0"):
    try:
        import beartype as _beartype
    except ImportError as _error:
        raise ImportError(
            "SLALOM_TYPECHECK=1 checks types with beartype: pip install 'slalom[typecheck]'."
        ) from _error
    from jaxtyping import install_import_hook as _install_import_hook

    del _beartype
    _checked = _install_import_hook("slalom", "beartype.beartype")
else:
    _checked = _contextlib.nullcontext()

with _checked:
    from . import schedules as schedules
    from . import where as where
    from ._chain import (
        Chain as Chain,
    )
    from ._chain import (
        Identity as Identity,
    )
    from ._chain import (
        chain as chain,
    )
    from ._chain import (
        named_chain as named_chain,
    )
    from ._fields import (
        Hyperparameter as Hyperparameter,
    )
    from ._fields import (
        hyperparameter as hyperparameter,
    )
    from ._fields import (
        map_params as map_params,
    )
    from ._fields import (
        param_like as param_like,
    )
    from ._fields import (
        per_leaf as per_leaf,
    )
    from ._model import apply_updates as apply_updates
    from ._optimizer import Optimizer as Optimizer
    from ._paced import AbstractPacedTransform as AbstractPacedTransform
    from ._train import train_step as train_step
    from ._transform import (
    )
    from ._transform import (
        AbstractTransform as AbstractTransform,
    )
    from ._transform import (
        Context as Context,
    )
    from .optimizers import (
        adam as adam,
    )
    from .optimizers import (
        adamw as adamw,
    )
    from .optimizers import (
        lion as lion,
    )
    from .optimizers import (
        rmsprop as rmsprop,
    )
    from .optimizers import (
        sgd as sgd,
    )
    from .transforms import (
        AddDecayedWeights as AddDecayedWeights,
    )
    from .transforms import (
        Clip as Clip,
    )
    from .transforms import (
        ClipByGlobalNorm as ClipByGlobalNorm,
    )
    from .transforms import (
        Scale as Scale,
    )
    from .transforms import (
        ScaleByAdam as ScaleByAdam,
    )
    from .transforms import (
        ScaleByLearningRate as ScaleByLearningRate,
    )
    from .transforms import (
        ScaleByLion as ScaleByLion,
    )
    from .transforms import (
        ScaleByRms as ScaleByRms,
    )
    from .transforms import (
        ScaleBySchedule as ScaleBySchedule,
    )
    from .transforms import (
        ScaleByStddev as ScaleByStddev,
    )
    from .transforms import (
        SetToZero as SetToZero,
    )
    from .transforms import (
        Trace as Trace,
    )
    from .wrappers import (
        EveryK as EveryK,
    )
    from .wrappers import (
        Masked as Masked,
    )
    from .wrappers import (
        Only as Only,
    )
    from .wrappers import (
        Partition as Partition,
    )
    from .wrappers import (
        partition as partition,
    )

__version__ = "0.1.0"
