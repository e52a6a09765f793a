"""The initial value of a mean of updates, in a dtype in which it can decay."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import tree
from ..._core.fields.schedule import AbstractSchedule
from ...tree.paths import dotted
from ...tree.types import Params, Tracer


def first_moment(
    rule: Any, params: Params, decay: str, *, dtype: str = "mu_dtype", wide: bool = False
) -> PyTree:
    """Zeros for the mean of updates of a rule.

    **Arguments:**

    - `rule`: a transform.
    - `params`: the parameters.
    - `decay`: the name of its decay.
    - `dtype`: the name of the field with the dtype of the mean.
    - `wide`: whether the default is at least float32, for a mean that is subtracted from updates.

    **Returns:** a tree like the parameters.

    **Raises:** a `ValueError` if the decay is known, and too slow for the dtype.
    """
    chosen = getattr(rule, dtype)
    if wide and chosen is None:
        return tree.zeros_like(params, tree.accumulation_dtype)
    mean = tree.first_moment(params, chosen)
    value = getattr(rule, decay)
    if not isinstance(value, AbstractSchedule | Tracer):
        _check_decay(f"{type(rule).__name__}.{decay}", float(value), mean, dtype)
    return mean


def _check_decay(name: str, decay: float, mean: PyTree, field: str) -> None:
    # Half the distance between two neighbors. What changes by less is rounded back.
    least = {x.dtype: float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(mean)}
    if decay == 1 or all(1 - decay >= change for change in least.values()):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(mean):
        if 1 - decay < least[x.dtype]:
            raise ValueError(
                f"{name} is {decay:.7g}, and a mean that is stored in {x.dtype}, as that of "
                f"'{dotted(path)}' would be, rounds back to its old value instead of decaying: "
                f'{x.dtype} allows at most {1 - least[x.dtype]:.6g}. Write `{field}="float32"`.'
            )
