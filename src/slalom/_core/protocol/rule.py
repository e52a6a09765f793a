"""Rules that say in phases what happens at one leaf. The engine does the rest."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Array, PyTree

from ... import tree
from ...tree.types import Params, Updates
from ..engine.run import Leafwise, RuleAt, run_rule
from .context import Context
from .parts import Part
from .transform import AbstractTransform, State
from .write import ADD, RETURN, Writer


class AbstractRule(AbstractTransform[State]):
    """An update rule, written as what happens at one leaf.

    To write one, subclass this, declare the hyperparameters, and write `init` and those phases
    that the rule has:

    | phase | sees | does |
    |---|---|---|
    | `begin` | the numbers of this step | adds others, such as bias corrections |
    | `advance` | a gradient and the old state | assigns the new state |
    | `direction` | a gradient and the new state | returns the update |

    ```python
    >>> class MomentumState(eqx.Module):
    ...     mu: object = sl.fields.param_like()
    >>> class Momentum(sl.AbstractRule):
    ...     b1: sl.Hyperparameter = sl.fields.hyperparameter(0.9)
    ...     def init(self, params):
    ...         return MomentumState(sl.tree.first_moment(params))
    ...     def advance(self, now, g, leaf):
    ...         leaf.mu = now.b1 * leaf.mu + g
    ...     def direction(self, now, g, leaf):
    ...         return leaf.mu
    >>> opt = sl.Optimizer(Momentum() | sl.ScaleByLearningRate(0.1), {"w": jnp.ones(2)})

    ```

    The phases do arithmetic on one array. They need no casts, no trees and no order of writing:
    all numbers arrive in the accumulation dtype of the leaf, new state is stored as it was
    declared, also in the codec of `.store`, and the update follows from the state as it is stored.
    """

    over: ClassVar[str] = "number"
    """What a phase needs at once: one `"number"`, so that a leaf may be cut into pieces, or a whole
    `"leaf"`, as for a norm."""

    written_last: ClassVar[tuple[str, ...]] = ()
    """Fields of the state that are written after the others, because the new values of the others
    follow from their old ones."""

    @property
    def elementwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.over == "number"

    # --- the phases -------------------------------------------------------------------------

    def plan(self, params: Params) -> Sequence[Any] | None:
        """Something static for each leaf, which the phases see as `leaf.plan`.

        **Arguments:**

        - `params`: the parameters, of which only shapes and dtypes may be used.

        **Returns:** hashable values, one for each leaf, or `None`.
        """
        del params
        return None

    def begin(self, now: Any, state: Any) -> None:
        """Adds numbers that follow from others, and replaces scalars of the state.

        **Arguments:**

        - `now`: the hyperparameters at this step. What is added may be a scalar, or a vector with
            an entry for each leaf, of which a leaf sees its own.
        - `state`: those fields of the state that are not shaped like the parameters, for example
            `age`. What is assigned is the new state.
        """
        del now, state

    def advance(self, now: Any, g: Array, leaf: Any) -> None:
        """Assigns the new state of a leaf.

        **Arguments:**

        - `now`: the numbers of this step.
        - `g`: the gradient.
        - `leaf`: the old state by field. What is assigned to a field is stored; other attributes
            are kept for `direction`. `leaf.p` is the parameter, if the rule `needs` `"params"`, and
            `leaf.plan` what `plan` says of it.
        """
        del now, g, leaf

    @abc.abstractmethod
    def direction(self, now: Any, g: Array, leaf: Any) -> Array:
        """The update of a leaf.

        **Arguments:**

        - `now`, `g`, `leaf`: as for `advance`. `leaf` has the new state, as it is stored.

        **Returns:** the update.
        """

    # --- what follows from them -------------------------------------------------------------

    def init(self, params: Params) -> State:
        return tree.no_state(params)  # pyright: ignore[reportReturnType]

    def update(
        self,
        updates: Updates,
        state: State,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, State]:
        return self.run(RETURN, updates, state, params, context)

    def step(
        self, grads: Updates, state: State, params: Params, context: Context | None = None
    ) -> tuple[Params, State]:
        return self.run(ADD, grads, state, params, context)

    def run(
        self,
        write: Writer,
        updates: PyTree,
        state: State,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, State]:
        return run_rule(Part((), self, state, context, params, lambda rule: rule), write, updates)

    def run_at_rest(self, part: Part, write: Writer, updates: PyTree) -> tuple[Any, State]:
        return run_rule(part, write, updates)

    def leafwise(self, part: Part, leaves: tuple[int, ...]) -> Leafwise | None:
        if not self.elementwise:
            return None
        return Leafwise([RuleAt(part, leaves)], lambda states: states[0])
