"""Weight decay inside rules that compute its factor themselves."""

from typing import Any

import equinox as eqx
import jax

from ...tree.types import Params
from ...where.resolve import Where, as_where_or_none, mask


def where_field() -> Any:
    """Declares an optional keyword, a selector; `None` selects all leaves."""
    return eqx.field(default=None, static=True, kw_only=True, converter=as_where_or_none)


def decay_mask(where: Where | None, params: Params) -> tuple[bool, ...]:
    """Whether each leaf decays."""
    if where is None:
        return (True,) * len(jax.tree.leaves(params))
    return mask(where, params)
