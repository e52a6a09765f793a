"""Samples of the parameters, at which gradients are taken."""

from typing import Any

import jax

from ... import tree
from ..._core.engine.encoded import decoded
from ..._core.protocol.context import Context
from ..._core.protocol.sampler import AbstractSampler
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.walk import transforms
from ...tree.types import Params
from ...wrappers.scope.split_complex import joined

_ELSEWHERE = ("value_fn", "grad_fn", "sampled_grad_fn", "residuals")
"""What a transform needs if it evaluates the loss at parameters of its own."""


def has_sampler(transform: AbstractTransform[Any]) -> bool:
    """Whether the gradients of a transform are taken at samples."""
    return any(isinstance(part.module, AbstractSampler) for part in transforms(transform))


def sampled_params(
    transform: AbstractTransform[Any], state: Any, count: Any, params: Params, key: Any = None
) -> Params:
    """A sample of the parameters, in their dtypes. Without a key, that of the next gradient."""
    context = Context(step=count)
    found = transforms(transform, state, context, params)
    samplers = [part for part in found if isinstance(part.module, AbstractSampler)]
    keys = [None] * len(samplers) if key is None else list(jax.random.split(key, len(samplers)))
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: x is None)
    for part, own in zip(samplers, keys, strict=True):
        noise = part.module.noise(decoded(part.state), part.params, part.context, own)
        for i, x in enumerate(structure.flatten_up_to(joined(noise))):
            if x is not None:
                leaves[i] = tree.add(leaves[i], x)
    return structure.unflatten(leaves)


def check_samplers(transform: AbstractTransform[Any]) -> None:
    """Raises an error for transforms that take gradients elsewhere than at the samples."""
    if not has_sampler(transform):
        return
    for part in transforms(transform):
        if set(_ELSEWHERE) & set(part.module.needs):
            raise ValueError(
                f"'{part.name}' evaluates the loss at parameters of its own, but this optimizer "
                "learns a posterior from gradients at its samples. Use one of the two."
            )
