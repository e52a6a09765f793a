"""Transforms that write parameters themselves, and the parameters to evaluate."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._types import Params
from .transform import AbstractTransform, Context, parts


class AbstractParameterWriter(AbstractTransform):
    """A transform that writes parameters itself, and whose parameters are evaluated elsewhere.

    A subclass writes `init`, `update`, `step` and `eval_params`. It stands last in a chain,
    since no later link could change what it has written.
    """

    stands_last: ClassVar[bool] = True

    @abc.abstractmethod
    def step(
        self, grads: Any, state: Any, params: Params, context: Context | None = None
    ) -> tuple[Params, Any]:
        """As `AbstractTransform.step`."""

    @abc.abstractmethod
    def eval_params(self, state: Any, params: Params) -> Params:
        """The parameters to evaluate.

        **Arguments:**

        - `state`: this transform's state.
        - `params`: the parameters that are trained.

        **Returns:** a tree like `params`, in any precision, of arrays that are not the state's
        own: the next step may donate those.
        """


def evaluated(transform: AbstractTransform, state: Any, params: Params) -> Params:
    """The parameters to evaluate: at each leaf those of the outermost writer that acts on it."""
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_hole)
    settled = [False] * len(leaves)
    for part in parts(transform, state, params=params):
        if isinstance(part.transform, AbstractParameterWriter) and jax.tree.leaves(part.params):
            own = part.transform.eval_params(part.state, part.params)
            for i, x in enumerate(structure.flatten_up_to(own)):
                if x is not None and not settled[i]:
                    leaves[i] = jnp.asarray(x, leaves[i].dtype)
                    settled[i] = True
    return structure.unflatten(leaves)


def _is_hole(x: Any) -> bool:
    return x is None
