"""Weight decay inside of rules that compute its factor themselves."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ...tree.types import Params
from ...where.resolve import Where, as_where_or_none, mask


def where_field(*, kw_only: bool = False) -> Any:
    """Declares an optional selector; `None` selects all leaves."""
    return eqx.field(default=None, static=True, kw_only=kw_only, converter=as_where_or_none)


def decay_mask(where: Where | None, params: Params) -> tuple[bool, ...]:
    """Whether each leaf decays."""
    if where is None:
        return (True,) * len(jax.tree.leaves(params))
    return mask(where, params)


def decaying(where: Where | None, params: Params) -> PyTree:
    """For each leaf a tuple with the parameter if it decays, and an empty tuple if not.

    `tree.map_leaves` takes this under `per_param`. A factor for each leaf, 0 or λ, would make each
    leaf a kernel of its own.
    """
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(leaves, decay_mask(where, params), strict=True)
    return structure.unflatten([(x,) if keep else () for x, keep in pairs])
