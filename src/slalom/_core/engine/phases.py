"""A rule at one step: its phases at a leaf or at each of its matrices, and its sums over leaves."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.dtypes import accumulation_dtype, cast, in_precision_of, is_key, promoting
from ...tree.types import Scalar
from ...where.layout import Matrix
from ..protocol.parts import Part
from ..state.marks import params_like_fields
from .encoded import stored_like

_Rule = TypeVar("_Rule")

STEP = "_numbers"
"""The attribute that holds the numbers of a rule at a step."""


def at_step(rule: _Rule, numbers: dict[str, Any]) -> _Rule:
    """A copy of a rule with the numbers of one step, to which phases may assign others.

    **Arguments:**

    - `rule`: the rule, or such a copy of it.
    - `numbers`: its hyperparameters and other numbers, by name.
    """
    here = object.__new__(type(rule))
    vars(here).update(vars(rule), **numbers, **{STEP: numbers})
    return here


class LeafInputs(NamedTuple):
    """The inputs of a rule at a leaf, or with a leading axis at each matrix of a leaf."""

    u: Any
    """The update that comes in."""
    numbers: dict[str, Any]
    """The numbers of this step."""
    others: dict[str, Any]
    """The parameter as `"p"` and the gradient of the loss as `"grad"`, if the rule needs them."""
    fields: dict[str, Any]
    """The fields of the state."""
    seeds: dict[str, Any]
    """The seeds of the random bits of encoded fields."""


class Fields(SimpleNamespace):
    """The fields of a state that a phase reads and assigns."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            raise AttributeError(_no_field(name, vars(self)))
        old, new = (jax.tree.map(np.shape, x) for x in (vars(self)[name], value))
        if new != old:
            raise ValueError(f"The field '{name}' of the state has shape {old}, not {new}.")
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_field(name, vars(self)))


def _no_field(name: str, fields: Iterable[str]) -> str:
    names = ", ".join(f"'{n}'" for n in fields) or "none"
    return (
        f"The state has no field '{name}' in this phase; its fields are: {names}. A rule passes "
        f"other arrays to its later phases in attributes of its own: `self.{name} = ...`."
    )


# --- sums over leaves ----------------------------------------------------------------------

LeafSums: TypeAlias = dict[str, Any]
"""The result of `measure` or `reduce` at a leaf: sums, and sums of squares, by name."""
Again: TypeAlias = Callable[[Sequence[dict[str, Any]]], Sequence[LeafSums]]
"""Measures all leaves again, given the factors of each by name, with sums of squares of the scaled
arrays."""


class Sums:
    """The results of `measure` and `reduce`, summed over all leaves, by name."""

    def __init__(self, of_leaves: Sequence[LeafSums], again: Again, dtype: np.dtype):
        self._of_leaves, self._again, self._dtype = of_leaves, again, dtype
        self._totals: dict[str, Scalar] = {}

    def __getitem__(self, name: str) -> Scalar:
        if name not in self._totals:  # a second read must not add a conditional
            terms = self._terms(name)
            if terms and isinstance(terms[0], tree.SumOfSquares):
                total = tree.norm_of_all(terms, self._terms_again(name))
            else:
                total = tree.sum_of([cast(x, self._dtype) for x in terms])
            self._totals[name] = cast(total, self._dtype)
        return self._totals[name]

    def each(self, *names: str) -> Any:
        """The results of `measure` at each leaf: a vector with an entry per leaf, or one vector per
        name."""
        terms = [x for name in names for x in self._terms(name)]
        if not terms:
            values = jnp.zeros(0, self._dtype)
        elif isinstance(terms[0], tree.SumOfSquares):
            values = cast(tree.norms_of(terms, self._terms_again(*names)), self._dtype)
        else:
            values = jnp.stack([cast(x, self._dtype) for x in terms])
        vectors = jnp.split(values, len(names))
        return vectors if vectors[1:] else vectors[0]

    def _terms(self, name: str) -> list[Any]:
        if self._of_leaves and name not in self._of_leaves[0]:
            names = ", ".join(map(repr, self._of_leaves[0])) or "nothing"
            raise KeyError(f"{name}: `measure` and `reduce` return {names}.")
        return [leaf[name] for leaf in self._of_leaves]

    def _terms_again(self, *names: str) -> Callable[[list[Any]], list[tree.SumOfSquares]]:
        def again(factors: list[Any]) -> list[tree.SumOfSquares]:
            number = len(self._of_leaves)
            sums = self._again(
                [dict(zip(names, factors[n::number], strict=True)) for n in range(number)]
            )
            return [leaf[name] for name in names for leaf in sums]

        return again


# --- the phases ----------------------------------------------------------------------------


def in_one_precision(inputs: LeafInputs) -> tuple[LeafInputs, np.dtype]:
    """The inputs in the accumulation dtype of the leaf, and this dtype."""
    arrays = [inputs.u, *inputs.others.values(), *inputs.fields.values()]
    dtype = accumulation_dtype(*(x.dtype for x in arrays if isinstance(x, jax.Array | np.ndarray)))
    return in_precision_of(inputs._replace(seeds={}), dtype), dtype


@contextlib.contextmanager
def at_leaf(
    part: Part, plan: object, inputs: LeafInputs
) -> Iterator[tuple[Any, Array, Fields, np.dtype]]:
    """The rule, the gradient and the fields as phases see them, in one precision, and its dtype."""
    wide, dtype = in_one_precision(inputs)
    rule = at_step(part.module, {**wide.numbers, **wide.others, "plan": plan})
    with part.scope(), promoting(dtype):
        yield rule, wide.u, Fields(**wide.fields), dtype


def phases(
    part: Part, does: tuple[str, ...], plan: Any, inputs: LeafInputs, stored: LeafInputs
) -> tuple[Any, dict[str, Any]]:
    """The update of a leaf, if it is asked for its direction, and its new fields if it advances.

    **Arguments:**

    - `part`: the rule, and what it sees.
    - `does`: the phases, `"advance"`, `"direction"` or both.
    - `plan`, `inputs`: as the leaf has them.
    - `stored`: the inputs with the fields as they are stored.
    """
    last, old_fields, seeds = part.module.written_last, stored.fields, stored.seeds

    def at_one(inputs: LeafInputs) -> tuple[Any, dict[str, Any]]:
        with at_leaf(part, plan, inputs) as (rule, g, leaf, dtype):
            new_fields = {}
            if "advance" in does:
                old = dict(vars(leaf))
                rule.advance(g, leaf)
                new = {n: x for n, x in vars(leaf).items() if x is not old[n]}
                first = [x for n, x in new.items() if n not in last]
                for name, x in new.items():
                    value = _written_after(first, x) if name in last else x
                    new_fields[name], seen = stored_like(old_fields[name], value, seeds.get(name))
                    setattr(leaf, name, in_precision_of(seen, dtype))
            if "direction" not in does:
                return None, new_fields
            update = rule.direction(g, leaf)
            shape = getattr(update, "shape", None)
            if shape != g.shape:
                kind = f"of type {type(update).__name__}" if shape is None else f"of shape {shape}"
                raise TypeError(
                    f"{type(rule).__name__}.direction must return an array of shape {g.shape}, as "
                    f"the gradient has, got something {kind}."
                )
            return update, new_fields

    if part.module.over != "matrix":
        return at_one(inputs)
    if inputs.u.size == 0:
        return tree.widened(inputs.u), {}
    update, new_fields = at_each_matrix(at_one, inputs, plan, part.state)
    update = None if update is None else plan.write(update)
    return update, unstacked(new_fields, plan, part.state)


def measured(
    part: Part, phase: str, plan: Any, inputs: LeafInputs, factors: dict[str, Any]
) -> LeafSums:
    """The result of `measure` or `reduce` at a leaf, with sums of squares in place of norms."""

    def at_one(inputs: LeafInputs) -> LeafSums:
        with at_leaf(part, plan, inputs) as (rule, g, leaf, _):
            sums = getattr(rule, phase)(g, leaf)
        if not isinstance(sums, dict) or any(getattr(x, "ndim", 0) for x in sums.values()):
            raise TypeError(
                f"{type(rule).__name__}.{phase} must return a dictionary of scalars, got {sums!r}."
            )
        return sums

    def total(name: str, x: Any) -> Any:
        if isinstance(x, tree.NormOf):  # of all matrices of the leaf
            return x.squared(factors.get(name))
        return jnp.sum(x, axis=0) if over_matrices else x

    over_matrices = part.module.over == "matrix"
    sums = at_each_matrix(at_one, inputs, plan, part.state) if over_matrices else at_one(inputs)
    with part.scope():
        return {name: total(name, x) for name, x in sums.items()}


def _written_after(others: list[Array], x: Array) -> Array:
    """`x`, written after others.

    The condition never holds, and XLA does not know. Thus `x` seems to depend on these arrays, so
    XLA writes it last and in place. Otherwise it would copy the array that `x` replaces, which the
    others still read.
    """
    condition = jnp.bool_(True)
    for other in others:
        condition = condition & (other.real > jnp.inf)
    return jnp.where(condition, 0, x)


# --- a leaf as a stack of its matrices ---------------------------------------------------------


def stacked(inputs: LeafInputs, matrix: Matrix, state: PyTree) -> LeafInputs:
    """The inputs of a rule at each matrix of a leaf, along a leading axis.

    Fields of the state that are not shaped like the parameters have this axis already.
    """
    like_params = params_like_fields(state)

    def number(x: Array) -> Array:
        if is_key(x):
            return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(matrix.batch))
        return jnp.full(matrix.batch, x)

    return LeafInputs(
        u=matrix.read(inputs.u),
        numbers={name: number(x) for name, x in inputs.numbers.items()},
        others={name: matrix.read(x) for name, x in inputs.others.items()},
        fields={
            name: matrix.read(x) if name in like_params and x is not None else x
            for name, x in inputs.fields.items()
        },
        seeds={},
    )


def unstacked(fields: dict[str, Any], matrix: Matrix, state: PyTree) -> dict[str, Any]:
    """New fields at each matrix as fields of the leaf."""
    like_params = params_like_fields(state)
    return {name: matrix.write(x) if name in like_params else x for name, x in fields.items()}


def at_each_matrix(
    function: Callable[[LeafInputs], Any], inputs: LeafInputs, matrix: Matrix, state: PyTree
) -> Any:
    """The results of a function of the inputs at each matrix of a leaf."""
    # Only keys differ between matrices. A conditional on a number must not become a selection.
    keys = {name: x for name, x in inputs.numbers.items() if is_key(x)}
    stack = stacked(inputs._replace(numbers=keys), matrix, state)
    # Also for one matrix: without its axis, XLA keeps copies of the gradients.
    return jax.vmap(lambda at: function(at._replace(numbers=inputs.numbers | at.numbers)))(stack)
