"""The base of all combinations of losses."""

import abc
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import tree
from .._core.fields.declare import read_numbers
from .._core.protocol.context import Context
from .._core.protocol.parts import AbstractDeclared


class Terms(eqx.Module):
    """The terms of the loss at a step. `sl.train_step` passes them to the transform.

    **Arguments:**

    - `losses`: the value of each term.
    - `gram`: the inner products of the gradients of the terms, where a combination uses them. They
        are multiplied by a power of 4 if they would overflow or underflow.
    """

    losses: Float[Array, " terms"]
    gram: Float[Array, "terms terms"] | None = None


class AbstractCombination(AbstractDeclared):
    """Weights the terms of a loss. A subclass declares its numbers and writes `weigh`.

    The numbers are hyperparameters: inside `tx.combine` they are traced and listed in
    `opt.hyperparams`, and they can be schedules.
    """

    uses_gram: ClassVar[bool] = True
    """Whether the weights depend on the gradients. If not, one backward pass is enough."""

    def init(self, number: int) -> Any:
        """The state for a number of terms."""
        del number
        return None

    def check(self, number: int) -> None:
        """Raises an error if this many terms cannot be combined."""
        del number

    @abc.abstractmethod
    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: Any
    ) -> tuple[Float[Array, " terms"], Any]:
        """The weights of a step.

        **Arguments:**

        - `now`: the hyperparameters at this step, by name.
        - `terms`: the losses, and the Gram matrix if this class uses it.
        - `state`: the state.

        **Returns:** one weight per term, and the new state.
        """

    def at_step(
        self, terms: Terms, state: Any, context: Context | None
    ) -> tuple[Float[Array, " terms"], Any]:
        """As `weigh`, with the hyperparameters of the step, all in the dtype of the losses."""
        dtype = terms.losses.dtype

        def cast(x: Any) -> Any:
            return jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x

        numbers = read_numbers(self, context)
        now = SimpleNamespace(**{name: cast(x) for name, x in numbers.items()})
        known = Terms(terms.losses, None if terms.gram is None else cast(terms.gram))
        weights, new = self.weigh(now, known, jax.tree.map(cast, state))
        return cast(weights), tree.cast_like(new, state)


def normalized(gram: Float[Array, "terms terms"]) -> Float[Array, "terms terms"]:
    """The matrix divided by its trace; 0 if there is nothing to divide."""
    trace = jnp.trace(gram)
    return gram / jnp.where(trace == 0, 1, trace)
