"""The state of `to_optax`, and functions that read and change it.

Optax looks for names in dicts and named tuples. So each part of the state is in a node that is a
named tuple for whoever asks, and for JAX a container of the part, whose marks stay visible.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
from jax.tree_util import SequenceKey
from jaxtyping import Array, Int

from .._core.fields.hyperparams import Readings, targets
from .._core.protocol.transform import AbstractTransform
from .._core.state.marks import children_by_name, marks, with_fields
from .._loop.binding.binding import Arrays, Binding, named_arrays
from .._loop.binding.model import Model, split
from .._loop.binding.optimizer import Optimizer
from ..tree.packed import holds_arrays, pack, unpack
from ..tree.types import PyTree
from ..wrappers.scope.forms import Joined
from ._flax import pure


class OptaxFields(NamedTuple):
    """The state of `to_optax` without the transform."""

    count: Int[Array, "*runs"]  # pyright: ignore[reportIncompatibleMethodOverride]  # Optax's name
    inner_state: Any


class _AbstractNamed(tuple):
    """A state, the only entry of this tuple, whose fields read like the fields of a named tuple."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        return _named, tuple(self)

    def __repr__(self) -> str:
        return repr(self[0])

    def _replace(self, **fields: Any) -> "_AbstractNamed":
        return _named(with_fields(self[0], fields))


def _named(state: Any) -> _AbstractNamed:
    return _kind(type(state))((state,))


@functools.cache
def _kind(cls: type) -> type[_AbstractNamed]:
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static", False)]
    # "count" is the number of updates alone.
    names = [name for name in names if name != "count"]
    # Properties, because a tuple has methods `count` and `index`.
    fields = {n: property(lambda node, n=n: getattr(node[0], n)) for n in names}
    kind = type(
        cls.__name__, (_AbstractNamed,), {"__slots__": (), "_fields": tuple(names)} | fields
    )
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda node: (((SequenceKey(0), node[0]),), None),
        lambda _, children: kind(children),
    )
    return kind


def with_names(state: Any) -> Any:
    """The state with names for each part that has marked fields."""

    def name(node: Any) -> Any:
        if not marks(node):
            return node
        inside = {name: with_names(child) for name, child in children_by_name(node).items()}
        return _named(with_fields(node, inside))

    return jax.tree.map(name, state, is_leaf=lambda node: bool(marks(node)))


def without_names(state: Any) -> Any:
    """Undoes `with_names`."""

    def plain(node: Any) -> Any:
        if not isinstance(node, _AbstractNamed):
            return node
        inside = {name: without_names(x) for name, x in children_by_name(node[0]).items()}
        return with_fields(node[0], inside)

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, _AbstractNamed))


State = TypeVar("State")


class ToOptaxState(eqx.Module):
    """The state of a transform that `sl.interop.to_optax` made for Optax.

    All of its leaves are arrays. Read and change it with the functions of `sl.interop`.
    `optax.tree.get(state, "count")` and `optax.tree.get(state, "mu")` find the number of updates
    and the fields of rules.
    """

    __frozen__: ClassVar[tuple[str, ...]] = ("**",)

    transform: Any
    """The transform, with its hyperparameters as arrays."""
    fields: OptaxFields
    """The number of calls of `update` so far, and the state of the transform."""
    given: tuple[str, ...] = eqx.field(static=True)
    """The paths of values that were passed to `to_optax` as arrays. Each call of `to_optax` sets
    them."""

    @property
    def count(self) -> Int[Array, "*runs"]:
        """The number of calls of `update` so far."""
        return self.fields.count

    @property
    def inner_state(self) -> Any:
        """The state of the transform."""
        return without_names(unpack(self.fields.inner_state))

    @property
    def hyperparams(self) -> Readings:
        """See `sl.interop.hyperparams(state)`."""
        return as_optimizer(self).hyperparams


# --- to an optimizer and back ---------------------------------------------------------------


def as_state(
    transform: AbstractTransform[Any], inner_state: Any, count: Any, given: tuple[str, ...]
) -> ToOptaxState:
    """The state with these parts, in which all leaves are arrays."""
    named = with_names(inner_state)
    rule, named = (x if holds_arrays(x) else pack(x) for x in (transform, named))
    return ToOptaxState(rule, OptaxFields(count, named), given)


_NO_PARAMS = jax.tree.structure(None)


def as_optimizer(state: ToOptaxState, structure: Any = _NO_PARAMS) -> Optimizer:
    """An optimizer with the parts of a state, bound to parameters of this structure."""
    arrays = Arrays(pack(unpack(state.transform)), pack(state.inner_state), state.count)
    return Optimizer._from_fields(arrays, Binding(None, structure))


def updated(state: ToOptaxState, opt: Optimizer) -> ToOptaxState:
    """The state with the parts of an optimizer."""
    return as_state(opt.transform, opt.state, opt.arrays.count, state.given)


def names(state: ToOptaxState) -> dict[str, Any]:
    """The arrays of a state by their full paths."""
    return named_arrays(as_optimizer(state).arrays)


def renamed(state: ToOptaxState, arrays: Mapping[str, Any]) -> ToOptaxState:
    """Undoes `names`: the state with other arrays."""
    opt = jax.tree.structure(as_optimizer(state)).unflatten(arrays.values())
    return updated(state, opt)


# --- without parameters ---------------------------------------------------------------------


class _Anything:
    """Equal to everything, as a static field of a state for any parameters."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def for_any_params(state: Any) -> Any:
    """A prefix of the states for all parameters, from the state for a tree without arrays.

    `optax.tree.map_params` compares the two. The static fields of a state, such as the shapes in
    `FlattenState`, depend on the parameters.
    """

    def visit(node: Any) -> Any:
        if not isinstance(node, eqx.Module):
            return node
        if isinstance(node, Joined):
            return node.apart
        new = object.__new__(type(node))
        for field in dataclasses.fields(node):
            static = field.metadata.get("static", False)
            value = _Anything() if static else for_any_params(getattr(node, field.name))
            object.__setattr__(new, field.name, value)
        return new

    return jax.tree.map(visit, state, is_leaf=lambda x: isinstance(x, eqx.Module))


# --- reading and changing it ----------------------------------------------------------------


def hyperparams(state: PyTree) -> Readings:
    """The value that the next update uses for each hyperparameter, by path.

    The paths are the same as in `opt.hyperparams`, and any unambiguous suffix works as a key.

    **Arguments:**

    - `state`: the state of a transform that `sl.interop.to_optax` made, or a tree that contains
        one, such as the state of an `optax.chain` or a `TrainState`.

    **Returns:** a read-only mapping.

    ```python
    >>> state = sl.interop.to_optax(sl.adam(1e-3)).init({"w": jnp.ones(2)})
    >>> sl.interop.hyperparams(state)["learning_rate"]
    Array(0.001, dtype=float32)

    ```
    """
    return as_optimizer(_the_state(state, "hyperparams")).hyperparams


def with_hyperparams(
    state: State, values: Mapping[str, Any] | None = None, /, **named: Any
) -> State:
    """Returns a state with other hyperparameters. The next update uses them without recompiling.

    **Arguments:**

    - `state`: as for `hyperparams`.
    - `values`: new values by path, as for `opt.with_hyperparams`.
    - `named`: the same as keywords: `learning_rate=1e-4`.

    **Returns:** the state, or the tree that contains it, with the same structure.

    **Raises:** `KeyError` for an unknown or ambiguous name, with the candidates; `ValueError` for
    a value outside its interval, a number in place of a schedule or the reverse, and for a
    hyperparameter that was given to `to_optax` as an array.

    ```python
    >>> state = sl.interop.to_optax(sl.adam(1e-3)).init({"w": jnp.ones(2)})
    >>> state = sl.interop.with_hyperparams(state, learning_rate=1e-4)

    ```
    """
    old = _the_state(state, "with_hyperparams")
    opt = as_optimizer(old)
    values = {**(values or {}), **named}
    for name in values:
        for path in targets(opt.transform, name):
            if path in old.given:
                raise ValueError(
                    f"'{path}' was passed to `sl.interop.to_optax` as an array, so it belongs to "
                    "that transform and not to its state. Pass a Python number, which the state "
                    "holds, or call `to_optax` again with another array."
                )
    new = updated(old, opt.with_hyperparams(values))
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"Changing {', '.join(map(repr, values))} this way would change the structure of the "
            "state. Replace numbers by numbers. For a schedule in place of a number, make "
            "another transform: `sl.interop.to_optax(new_tx)`."
        )

    def replaced(node: Any) -> Any:
        # Its arrays may be in nnx variables.
        return jax.tree.structure(node).unflatten(jax.tree.leaves(new)) if _is_state(node) else node

    return jax.tree.map(replaced, state, is_leaf=_is_state)


def eval_params(state: PyTree, params: Model) -> Model:
    """The parameters to evaluate: slow weights under `.lookahead`, the average under `.average`.

    **Arguments:**

    - `state`: as for `hyperparams`.
    - `params`: the parameters, as `optax.apply_updates` returned them.

    **Returns:** a tree like the parameters, every leaf in its own dtype.

    ```python
    >>> params = {"w": jnp.ones(2)}
    >>> tx = sl.interop.to_optax(sl.sgd(0.1).average())
    >>> sl.interop.eval_params(tx.init(params), params)
    {'w': Array([1., 1.], dtype=float32)}

    ```
    """
    plain = pure(params)
    structure = jax.tree.structure(split(plain, None).params)
    new = as_optimizer(_the_state(state, "eval_params"), structure).eval_params(plain)
    return jax.tree.structure(params).unflatten(jax.tree.leaves(new))


def metrics(state: PyTree) -> Readings:
    """The metrics of the last update, such as the norms of `tx.record()`.

    **Arguments:**

    - `state`: as for `hyperparams`.

    **Returns:** a read-only mapping, as `opt.metrics`.
    """
    return as_optimizer(_the_state(state, "metrics")).metrics


def _is_state(node: Any) -> bool:
    return isinstance(node, ToOptaxState)


def _the_state(within: PyTree, who: str) -> ToOptaxState:
    """The one `ToOptaxState` in a tree."""
    nodes = jax.tree_util.tree_leaves_with_path(within, is_leaf=_is_state)
    states = [(path, node) for path, node in nodes if _is_state(node)]
    if len(states) == 1:
        return pure(states[0][1])
    if not states:
        raise TypeError(
            f"`sl.interop.{who}` takes the state of a transform that `sl.interop.to_optax` made, "
            f"or a tree that contains one, got something of type {type(within).__name__} without "
            "one."
        )
    places = ", ".join(f"`state{jax.tree_util.keystr(path)}`" for path, _ in states)
    raise ValueError(
        f"This tree contains {len(states)} states of `sl.interop.to_optax`. Pass one of them to "
        f"`sl.interop.{who}`: {places}."
    )
