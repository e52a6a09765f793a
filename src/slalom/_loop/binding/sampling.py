"""Samples of the parameters, at which gradients are taken."""

from typing import Any

import jax

from ... import tree
from ..._core.engine.encoded import decoded
from ..._core.protocol.loss import Loss
from ...tree.types import Params
from ...wrappers.scope.forms import joined


def sampled_params(loss: Loss, params: Params, key: Any = None) -> Params:
    """The parameters at which to evaluate a loss, in their dtypes. Without a key, the sample of the
    next gradient."""
    samplers = loss.askers("sampled parameters")
    keys = [None] * len(samplers) if key is None else list(jax.random.split(key, len(samplers)))
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: x is None)
    for part, own in zip(samplers, keys, strict=True):
        noise = part.module.noise(decoded(part.state), part.params, part.context, own)
        for i, x in enumerate(structure.flatten_up_to(joined(noise))):
            if x is not None:
                leaves[i] = tree.add(leaves[i], x)
    return structure.unflatten(leaves)
