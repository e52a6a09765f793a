"""Transforms that write parameters themselves, and the parameters to evaluate."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from ...tree.types import Params
from ..state.walk import parts
from .context import Context
from .transform import AbstractTransform, State


class AbstractParameterWriter(AbstractTransform[State]):
    """A transform that writes parameters itself, and keeps other parameters to evaluate.

    A subclass writes `init`, `update`, `step` and `eval_params`. It must be the last link of a
    chain: a later link could not change the written parameters.
    """

    @abc.abstractmethod
    def step(
        self, grads: Any, state: State, params: Params, context: Context | None = None
    ) -> tuple[Params, State]:
        """As `AbstractTransform.step`."""

    @abc.abstractmethod
    def eval_params(self, state: State, params: Params) -> Params:
        """The parameters to evaluate.

        **Arguments:**

        - `state`: this transform's state.
        - `params`: the parameters that are trained.

        **Returns:** a tree like `params`, in any precision. Its arrays must not be the state's own:
        the next step may donate those.
        """

    def full_params(self, state: State, params: Params) -> Params:
        """The parameters to evaluate, in the precision in which they are kept.

        **Arguments, Returns:** as for `eval_params`.
        """
        return self.eval_params(state, params)


def params_to_evaluate(
    root: AbstractTransform[Any], state: Any, params: Params, *, full_precision: bool = False
) -> Params:
    """The parameters to evaluate: at each leaf, those of the outermost writer that acts on it.

    **Arguments:**

    - `root`, `state`, `params`: a transform, its state, and the parameters that are trained.
    - `full_precision`: whether to keep the precision of the writer, or to use that of `params`.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_hole)
    found = [False] * len(leaves)
    for part in parts(root, state, params=params):
        if isinstance(part.module, AbstractParameterWriter) and jax.tree.leaves(part.params):
            method = part.module.full_params if full_precision else part.module.eval_params
            own = method(part.state, part.params)
            for i, x in enumerate(structure.flatten_up_to(own)):
                if x is not None and not found[i]:
                    leaves[i] = x if full_precision else jnp.asarray(x, leaves[i].dtype)
                    found[i] = True
    return structure.unflatten(leaves)


def _is_hole(x: Any) -> bool:
    return x is None
