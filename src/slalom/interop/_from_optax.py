"""A transform of Optax as one of Slalom, with marks on the parts of its state.

A part of the state with the structure of the parameters is put into a module with a mark. Slalom
then shards, saves, resets and describes it as it does the state of its own rules."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from wadler_lindig import TextDoc

from .. import tree
from .._core.engine.encoded import decoded, encoded_again
from .._core.fields.declare import hyperparameter
from .._core.fields.schedule import hyperparameter_fields
from .._core.protocol.context import Context
from .._core.protocol.transform import AbstractTransform
from .._core.state.marks import param_like, per_param
from .._core.text.messages import uncalled
from .._core.text.printing import Call
from ..tree.types import Hyperparameter, Params, PyTree, Step, Updates
from ._optax import (
    GradientTransformation,
    MultiSteps,
    import_optax,
    injected,
    name_of,
    required_keywords,
)


class Moment(eqx.Module):
    """A part of the state with an array of the same shape for each parameter."""

    params: PyTree = param_like()


class Factors(eqx.Module):
    """A part of the state with an array of another shape for each parameter."""

    params: PyTree = per_param()


class Shared(eqx.Module):
    """A number next to moments, such as the count for their bias correction."""

    shared: Any = per_param()  # of no parameter alone, so that a reset of some is refused


_NUMBERS = (bool, int, float)


def mark(state: PyTree, params: Params) -> PyTree:
    """The state of Optax with marks."""
    masked_node = import_optax("from_optax").MaskedNode
    structure = jax.tree.structure(params)
    shapes = [np.shape(x) for x in jax.tree.leaves(params)]

    def is_masked(x: Any) -> bool:
        return isinstance(x, masked_node)

    def like_params(node: Any) -> Any:
        leaves, inner_structure = jax.tree.flatten(node, is_leaf=is_masked)
        arrays = [x for x in leaves if not is_masked(x)]
        if inner_structure != structure or not arrays or not all(map(tree.is_array, arrays)):
            return None
        alike = all(
            is_masked(x) or (np.shape(x) == shape and tree.is_inexact(x))
            for x, shape in zip(leaves, shapes, strict=True)
        )
        # Every number has the structure of a single array, so a scalar shows nothing.
        if jax.tree_util.all_leaves([node]) and (not alike or not np.ndim(node)):
            return None
        without = structure.unflatten([None if is_masked(x) else x for x in leaves])
        return Moment(without) if alike else Factors(without)

    def visit(node: Any) -> Any:
        if isinstance(node, Moment | Factors | Shared):
            return Shared(node)  # of a transform of Optax in a transform of Slalom in this one
        marked = like_params(node)
        if marked is not None or jax.tree_util.all_leaves([node]):
            return node if marked is None else marked
        children, inner_structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        new = [visit(child) for child in children]
        if any(isinstance(x, Moment | Factors) for x in new):
            # An update may return Python numbers.
            new = [Shared(x) if tree.is_array(x) or isinstance(x, _NUMBERS) else x for x in new]
        return inner_structure.unflatten(new)

    return visit(state)


def unmark(state: PyTree, updates: Updates) -> PyTree:
    """Undoes `mark`, and decodes moments."""
    masked_node = import_optax("from_optax").MaskedNode
    structure = jax.tree.structure(updates)

    def plain(node: Any) -> Any:
        if isinstance(node, Shared):
            return node.shared
        if not isinstance(node, Moment | Factors):
            return node
        leaves = structure.flatten_up_to(decoded(node.params))
        return structure.unflatten([masked_node() if x is None else x for x in leaves])

    kinds = Moment | Factors | Shared
    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, kinds))


def stored_as(before: PyTree, after: PyTree, clock: Step | None) -> PyTree:
    """The new marked state, with its moments in the codecs of the old ones, and in the same dtypes.

    **Arguments:**

    - `before`, `after`: the old and the new state.
    - `clock`: the number of steps, for stochastic rounding.
    """

    def is_moment(node: Any) -> bool:
        return isinstance(node, Moment)

    def like(old: Any, new: Any) -> Any:
        return tree.cast(new, old.dtype) if tree.is_inexact(old) and tree.is_inexact(new) else new

    def again(path: Any, old: Any, new: Any) -> Any:
        if is_moment(old):
            new = encoded_again(old, new, clock, tree.dotted(path))
        return jax.tree.map(like, old, new)

    structures = (jax.tree.structure(x, is_leaf=is_moment) for x in (before, after))
    if len({*structures}) > 1:
        return after  # refused by the optimizer
    return jax.tree_util.tree_map_with_path(again, before, after, is_leaf=is_moment)


def owned(state: PyTree) -> PyTree:
    """The state as arrays that nothing else refers to, neither parameters nor closures of Optax.

    A training step donates the state, and must not donate anything else with it.
    """

    def copied(x: Any) -> Any:
        if not (tree.is_array(x) or isinstance(x, _NUMBERS)):
            return x
        x = jnp.copy(x)
        return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(copied, state)


_ALWAYS = ("value", "grad", "value_fn", "key", "weight")
"""The entries of the context that every transform of Optax with extra arguments gets."""


class _AbstractFromOptax(AbstractTransform[PyTree]):
    """A transform of Optax. Its subclasses have its hyperparameters as fields.

    **Arguments:**

    - `gt`: the `optax.GradientTransformation`.
    - `needs`: the names of the extra arguments that it needs.
    """

    gt: Any = eqx.field(static=True)
    needs: tuple[str, ...] = eqx.field(static=True)  # pyright: ignore[reportIncompatibleVariableOverride]  # a class of Slalom knows its own

    update_sign: ClassVar[int | None] = None
    # A transform of Slalom inside decodes what it has stored itself, on its own clock.
    reads_encoded: ClassVar[tuple[str, ...]] = ("state",)

    def init(self, params: Params) -> PyTree:
        with _usual_promotion():
            state = self.gt.init(params)
        return mark(owned(state), params)

    def update(self, updates, state, params=None, context=None):
        context = context or Context()
        before = self._widened(unmark(state, updates), updates if params is None else params)
        before = self._with_numbers(before, context)
        update = import_optax("from_optax").with_extra_args_support(self.gt).update
        with _usual_promotion():
            new, after = update(updates, before, params, **self._extra_args(context))
        return new, stored_as(state, mark(after, updates), context.stored_clock)

    def _widened(self, state: PyTree, params: Params) -> PyTree:
        """The state in the dtypes of `init`. Optax computes in those that it finds, and
        `.store("bfloat16")` leaves plain arrays."""
        widest = max((x.dtype.itemsize for x in jax.tree.leaves(params)), default=0)
        if all(x.dtype.itemsize >= widest for x in jax.tree.leaves(state) if tree.is_inexact(x)):
            return state
        with _usual_promotion():
            fresh = jax.eval_shape(self.gt.init, params)
        return jax.tree.map(
            lambda x, like: tree.cast(x, like.dtype) if tree.is_inexact(x) else x, state, fresh
        )

    def _with_numbers(self, state: PyTree, context: Context) -> PyTree:
        """The state of `optax.inject_hyperparams` with this transform's hyperparameters."""
        now = {
            name: tree.cast(x, state.hyperparams[name].dtype)
            for name, x in vars(self.at(context)).items()
        }
        return state._replace(hyperparams=state.hyperparams | now) if now else state

    def _extra_args(self, context: Context) -> dict[str, Any]:
        entries = {n: x for n in _ALWAYS if (x := getattr(context, n)) is not None}
        return dict(context.per_param or {}) | entries | dict(context.extra)

    def _code(self) -> Call:
        numbers = {f.name: getattr(self, f.name) for f in hyperparameter_fields(self)}
        return Call("sl.interop.from_optax", (TextDoc(f"<{name_of(self.gt.update)}>"),), numbers)


def from_optax(
    gt: "GradientTransformation | MultiSteps", *, needs: Iterable[str] = ()
) -> AbstractTransform[Any]:
    """Makes an Optax transformation usable as a Slalom transform.

    It takes whole models, joins chains, and can be wrapped: `.mask`, `.partition`, `.every_k`,
    `.if_finite`, `.average` and all others.

    ```python
    >>> import optax
    >>> sl.ClipByGlobalNorm(1.0) | sl.interop.from_optax(optax.adam(1e-3))
    sl.ClipByGlobalNorm(1.0) | sl.interop.from_optax(<chain(scale_by_adam, scale)>)

    ```

    The numbers of an Optax transformation are hidden in closures, so they are not hyperparameters:
    `opt.hyperparams` does not list them, and changing one means compiling another program. The
    exceptions are the floats of `optax.inject_hyperparams`:

    ```python
    >>> tx = sl.interop.from_optax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    >>> opt = sl.Optimizer(tx, {"w": jnp.ones(2)}).with_hyperparams(learning_rate=0.2)

    ```

    Schedules of Optax count in its own state: they count calls of `update`, and are not reset.

    Parts of Optax's state with the structure and shapes of the parameters are treated as moments by
    `sl.map_params`, `opt.describe`, `opt.shard_state`, `opt.reset`, `opt.rebind` and checkpoints. A
    count next to them belongs to all parameters: `opt.reset(model, where)` of only some is refused,
    and `opt.rebind` gives new parameters no bias correction of their own. If the only parameter is
    a scalar, no field is treated as a moment.

    **Arguments:**

    - `gt`: an `optax.GradientTransformation`, with or without extra arguments, or an
        `optax.MultiSteps`.
    - `needs`: the names of extra arguments that `gt` needs, for `opt.step(..., name=...)`. Those
        that its functions require, such as `value` and `value_fn` of `optax.lbfgs`, are found
        automatically. Pass trees like the parameters as `opt.step(..., per_param={name: tree})`:
        `.mask` and `.partition` cut them to the parameters that `gt` sees.

    **Returns:** a transform.

    **Raises:** `TypeError` for anything else; `ValueError` for `optax.lookahead`, whose parameters
    have a type of their own.
    """
    optax = import_optax("from_optax")
    passed: Any = gt
    gt = passed.gradient_transformation() if isinstance(passed, optax.MultiSteps) else passed
    if not isinstance(gt, optax.GradientTransformation):
        advice = uncalled(gt)
        if isinstance(gt, AbstractTransform):
            advice = " It is one of Slalom already: use it as it is."
        raise TypeError(
            "`sl.interop.from_optax` takes an `optax.GradientTransformation`, such as "
            f"`optax.adam(1e-3)`, got {gt!r}.{advice}"
        )
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise TypeError(f"`needs` must be a tuple of names: `needs=({needs!r},)`.")
    if "lookahead(" in f"{name_of(gt.update)}(":
        raise ValueError(
            "`optax.lookahead` needs parameters of its own type, `optax.LookaheadParams`. Write "
            "`sl.interop.from_optax(inner).lookahead(sync_period, slow_step_size)`."
        )
    numbers = {k: x for k, x in injected(gt.init).items() if k not in dir(_AbstractFromOptax)}
    every = tuple(dict.fromkeys((*required_keywords(gt.update), *needs)))
    return _class_with(tuple(numbers))(gt=gt, needs=every, **numbers)


@contextlib.contextmanager
def _usual_promotion() -> Iterator[None]:
    """JAX's default rules, which Optax is written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def _class_with(names: tuple[str, ...]) -> type[_AbstractFromOptax]:
    """The class with these hyperparameters."""
    about = {
        "__annotations__": dict.fromkeys(names, Hyperparameter),
        "__doc__": _AbstractFromOptax.__doc__,
        "__module__": _AbstractFromOptax.__module__,
    }
    return type(
        "FromOptax", (_AbstractFromOptax,), about | {name: hyperparameter() for name in names}
    )
