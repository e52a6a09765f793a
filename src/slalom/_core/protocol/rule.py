"""Rules that describe one leaf in phases. The engine does the rest."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.types import Params
from ...where.layout import Matrix
from ..engine.matrices import matrices, on_automatic_axes
from ..engine.phases import STEP, Sums
from ..engine.run import RuleAt, run_rule
from .bases import AbstractRunTransform
from .parts import Part
from .transform import State
from .writer import Writer


class AbstractRule(AbstractRunTransform[State]):
    """An update rule, written as phases at one leaf.

    To write one, subclass this, declare the hyperparameters, and write `init` and those phases
    that the rule has:

    | phase | reads | does |
    |---|---|---|
    | `plans` | the shapes of the parameters | returns something static for each leaf |
    | `begin` | scalars of the state | computes other numbers, such as bias corrections |
    | `measure` | a gradient and the old state | returns scalars that are summed, and norms |
    | `advance` | a gradient and the old state | assigns the new state |
    | `reduce` | a gradient and the new state | returns scalars that are summed, and norms |
    | `finish` | all sums | computes numbers from them |
    | `refresh` | a gradient and the state | assigns kept factors, in some steps only |
    | `direction` | a gradient and the new state | returns the update |

    ```python
    >>> class MomentumState(eqx.Module):
    ...     mu: object = sl.fields.param_like()
    >>> class Momentum(sl.AbstractRule):
    ...     b1: sl.fields.Number = sl.fields.hyperparameter(0.9)
    ...     def init(self, params):
    ...         return MomentumState(sl.tree.first_moment(params))
    ...     def advance(self, g, leaf):
    ...         leaf.mu = self.b1 * leaf.mu + g
    ...     def direction(self, g, leaf):
    ...         return leaf.mu
    >>> opt = sl.Optimizer(Momentum() | sl.ScaleByLearningRate(0.1), {"w": jnp.ones(2)})

    ```

    The phases do arithmetic on one array. They need no casts, no trees and no order of writing:
    all numbers arrive in the accumulation dtype of the leaf, new state is stored as it was
    declared, even in the codec of `.store`, and the update is computed from the state as it is
    stored.

    In the phases `self` is a copy of the rule at one step. Its hyperparameters are arrays, with the
    values of schedules, and other numbers may be assigned to it: later phases read them. It also
    has these attributes:

    | attribute | is |
    |---|---|
    | `self.p` | the parameter, if the rule `needs` `"params"` |
    | `self.grad` | the gradient of the loss, if it needs `"grad"` |
    | `self.value` | the loss, if it needs `"value"` |
    | `self.plan` | the entry of `plans` for this leaf |

    Numbers that all leaves share are computed from sums over them:

    ```python
    >>> class Unit(sl.AbstractRule):
    ...     def measure(self, g, leaf):
    ...         return {"square": jnp.sum(sl.tree.abs_squared(g))}
    ...     def finish(self, sums, state):
    ...         self.inverse = 1 / jnp.sqrt(sums["square"])
    ...     def direction(self, g, leaf):
    ...         return self.inverse * g
    >>> updates = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
    >>> Unit().update(updates, None)[0]
    {'b': Array([0.8], dtype=float32), 'w': Array([0.6], dtype=float32)}

    ```
    """

    over: ClassVar[str] = "number"
    """What a phase needs at once: one `"number"`, a whole `"leaf"`, as for a norm, or a `"matrix"`.
    For the last one a leaf is read as `sl.where.matrix` describes, with outputs as rows, and the
    phases see one matrix: the gradient, the parameter, and the fields that are shaped like the
    parameters. Other fields that belong to a leaf have an axis of matrices in front, which the
    phases do not see. A rule over numbers whose `finish` only reads
    sums over all leaves is over `"sums"`, so that `.flatten()` takes it."""

    written_last: ClassVar[tuple[str, ...]] = ()
    """Fields of the state that are written after the others, because the new values of the others
    follow from their old ones."""

    refreshes: ClassVar[tuple[str, ...]] = ()
    """The fields of the state that `refresh` assigns. `advance` may change them, too."""

    refresh_before: ClassVar[str] = "direction"
    """Whether `refresh` sees the new state of the other fields, before `"direction"`, or the old
    one, before `"advance"`."""

    if TYPE_CHECKING:  # as class variables, since fields would be arguments of the constructor
        p: ClassVar[Array]
        grad: ClassVar[Array]
        value: ClassVar[Array]
        plan: ClassVar[Any]

    else:  # a type checker would otherwise accept every name

        def __setattr__(self, name: str, value: object) -> None:
            if STEP in vars(self):
                vars(self)[STEP][name] = vars(self)[name] = value
            else:
                super().__setattr__(name, value)

    measures: ClassVar[bool] = False
    """Whether this rule sums over leaves before it advances. It does if it has a `measure`."""

    reduces: ClassVar[bool] = False
    """Whether this rule sums over leaves after it has advanced. It does if it has a `reduce`."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.measures = cls.measure is not AbstractRule.measure
        cls.reduces = cls.reduce is not AbstractRule.reduce
        cls.elementwise &= not (cls.measures or cls.reduces or cls.refreshes)
        # XLA would not decode blocks again after a sum over them, but keep all of the new state.
        cls.reads_encoded = ("elementwise" if cls.reduces else "state", "updates")
        if cls.over == "matrix" or cls.refreshes:
            cls.reads_encoded = ()  # the phases need all leaves of the state at once

    # --- the phases -------------------------------------------------------------------------

    def plans(self, params: Params) -> Sequence[Any] | None:
        """Something static for each leaf, which the phases read as `self.plan`.

        **Arguments:**

        - `params`: the parameters, of which only shapes and dtypes may be used.

        **Returns:** hashable values, one for each leaf, or `None`.
        """
        return None

    def begin(self, state: State) -> None:
        """Computes the numbers of this step from others, and replaces scalars of the state.

        A number that is assigned to `self` may be a scalar, or a vector with an entry for each
        leaf, of which a leaf reads its own.

        **Arguments:**

        - `state`: those fields of the state that are not shaped like the parameters, for example
            `age`. What is assigned is the new state.
        """

    def measure(self, g: Array, leaf: State) -> dict[str, Any]:
        """Measures a leaf before it advances.

        **Arguments:**

        - `g`, `leaf`: as for `advance`.

        **Returns:** real scalars by name, or `sl.tree.NormOf(x)`, a norm that neither overflows nor
            underflows. The names are the same for each leaf.
        """
        return {}

    def advance(self, g: Array, leaf: State) -> None:
        """Assigns the new state of a leaf.

        Arrays that are assigned to `self` are kept for `direction`, unless the rule has a `reduce`
        or a `refresh` in between.

        **Arguments:**

        - `g`: the gradient.
        - `leaf`: the old state by field. What is assigned to a field is stored.
        """

    def reduce(self, g: Array, leaf: State) -> dict[str, Any]:
        """Measures a leaf after it has advanced.

        **Arguments:**

        - `g`, `leaf`: as for `advance`. `leaf` has the new state, as it is stored.

        **Returns:** as for `measure`, under other names.
        """
        return {}

    def finish(self, sums: Sums, state: State) -> None:
        """Computes numbers from sums over all leaves, and replaces scalars of the state.

        It runs as soon as all sums are known: after `reduce`, or before `advance` if the rule only
        has a `measure`. All its numbers have the dtype of the sums, at least float32.

        **Arguments:**

        - `sums`: `sums["name"]` is the sum over all leaves of the entry `"name"` that `measure` or
            `reduce` has returned, or the norm of all leaves together; 0 without leaves.
            `sums.each("name")` is a vector with the entry of each leaf. Ask for several norms in
            one call, `sums.each("u", "p")`: each call makes a conditional.
        - `state`: as for `begin`.
        """

    def refresh(self, g: Array, leaf: State) -> None:
        """Assigns the fields in `refreshes`, in steps in which `self.due` is true.

        It runs for all leaves in one conditional, so the steps in between do not pay for it. Small
        matrices of equal shape are then processed together. `begin` sets `self.due`: a bool, or one
        for each leaf.

        **Arguments:**

        - `g`, `leaf`: as for `advance`. What is assigned to other fields is dropped.
        """

    @abc.abstractmethod
    def direction(self, g: Array, leaf: State) -> Array:
        """The update of a leaf.

        **Arguments:**

        - `g`, `leaf`: as for `advance`. `leaf` has the new state, as it is stored.

        **Returns:** the update.
        """

    # --- helpers ----------------------------------------------------------------------------

    def for_each_matrix(
        self, params: Params, function: Callable[[int, int, np.dtype], tuple[Array, ...]]
    ) -> PyTree:
        """State for each matrix, for the `init` of a rule over matrices.

        **Arguments:**

        - `params`: the parameters.
        - `function`: from the numbers of rows and columns of a matrix, and the dtype to compute in,
            at least float32, to a tuple of arrays.

        **Returns:** at each leaf these arrays, with an axis of its matrices in front.
        """

        def at_leaf(matrix: Matrix, x: PyTree) -> tuple[Array, ...]:
            dtype = tree.accumulation_dtype(tree.canonical(x.dtype))
            arrays = function(matrix.rows, matrix.columns, dtype)
            return tuple(jnp.broadcast_to(a, (matrix.batch, *a.shape)) for a in arrays)

        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(map(at_leaf, matrices(self, params), leaves))

    # --- what follows from them -------------------------------------------------------------

    def init(self, params: Params) -> State:
        return tree.no_state(params)  # pyright: ignore[reportReturnType]  # a rule without `init` has no state

    def run(self, here: Part, write: Writer, updates: PyTree) -> tuple[Any, State]:
        if self.over != "matrix" and not self.refreshes:
            return run_rule(here, write, updates)

        def run(rule, updates, state, params, context):
            inside = here._replace(module=rule, state=state, context=context, params=params)
            return run_rule(inside, write, updates)

        like = (updates, here.state)
        return on_automatic_axes(run, like, self, *like, here.params, here.context)

    def leafwise(self, here: Part, leaves: tuple[int, ...]) -> RuleAt | None:
        return RuleAt(here, leaves) if self.elementwise else None
