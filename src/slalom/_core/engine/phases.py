"""The phases of one rule at one leaf, and what it sums over leaves."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.dtypes import accumulation_dtype, cast, in_precision_of, real_dtype
from ...tree.types import Scalar
from ..protocol.parts import Part
from .matrices import OneByOne, Seen, is_number

Store: TypeAlias = Callable[[str, Any], Any]
"""Stores a new value of a field, and returns it as later phases see it."""
Found: TypeAlias = dict[str, Any]
"""What `measure` or `reduce` has found at a leaf: sums, and sums of squares, by name."""
Again: TypeAlias = Callable[[Sequence[dict[str, Any]]], Sequence[Found]]
"""From factors at each leaf by name to what is found there again, with sums of the squares of
arrays times these."""


class Sums:
    """What `measure` and `reduce` have returned, summed over all leaves, by name."""

    def __init__(self, found: Sequence[Found], again: Again, dtype: np.dtype):
        self._found, self._again, self._dtype = found, again, dtype
        self._totals: dict[str, Scalar] = {}

    def __getattr__(self, name: str) -> Scalar:
        if name not in self._totals:  # the next time, no second conditional
            terms = [one[name] for one in self._found]
            if terms and isinstance(terms[0], tree.SumOfSquares):
                total = tree.norm_of_all(terms, self._terms_again(name))
            else:
                total = tree.sum_of([cast(x, self._dtype) for x in terms])
            self._totals[name] = cast(total, self._dtype)
        return self._totals[name]

    def each(self, *names: str) -> Any:
        """What the leaves have measured: a vector with an entry for each, or one for each name."""
        terms = [one[name] for name in names for one in self._found]
        if not terms:
            values = jnp.zeros(0, self._dtype)
        elif isinstance(terms[0], tree.SumOfSquares):
            values = cast(tree.norms_of(terms, self._terms_again(*names)), self._dtype)
        else:
            values = jnp.stack([cast(x, self._dtype) for x in terms])
        vectors = jnp.split(values, len(names))
        return vectors if vectors[1:] else vectors[0]

    def _terms_again(self, *names: str) -> Callable[[list[Any]], list[tree.SumOfSquares]]:
        def again(factors: list[Any]) -> list[tree.SumOfSquares]:
            number = len(self._found)
            found = self._again(
                [dict(zip(names, factors[n::number], strict=True)) for n in range(number)]
            )
            return [one[name] for name in names for one in found]

        return again


@contextlib.contextmanager
def at_leaf(
    part: Part,
    plan: Any,
    numbers: dict[str, Any],
    u: Array,
    others: dict[str, Array],
    fields: dict[str, Any],
) -> Iterator[tuple[SimpleNamespace, Array, SimpleNamespace, Callable[[PyTree], PyTree]]]:
    """What a phase sees: the numbers, the gradient and the leaf, in one precision. And a function
    that brings other arrays to it."""
    shaped = [x for x in fields.values() if isinstance(x, jax.Array | np.ndarray)]
    dtype = accumulation_dtype(*(x.dtype for x in (u, *others.values(), *shaped)))
    real = real_dtype(dtype)
    now = SimpleNamespace(**{n: cast(x, real) if is_number(x) else x for n, x in numbers.items()})

    def wide(x: Any) -> Any:
        return jax.tree.map(lambda x: in_precision_of(x, dtype), x)

    u, others, fields = wide((u, others, fields))
    leaf = SimpleNamespace(**fields, **others, plan=plan)
    # Under strict promotion, which users may choose, real times complex would be refused.
    promoting = contextlib.nullcontext() if dtype == real else jax.numpy_dtype_promotion("standard")
    with part.scope(), promoting:
        yield now, u, leaf, wide


def phases(
    part: Part,
    does: tuple[str, ...],
    plan: Any,
    numbers: dict[str, Any],
    u: Array,
    others: dict[str, Array],
    fields: dict[str, Any],
    store: Store,
) -> Any:
    """Advances the state of a leaf and stores it, or returns the update, or does both.

    **Arguments:**

    - `part`: the rule, and what it sees.
    - `does`: the phases, `"advance"`, `"direction"` or both.
    - `plan`, `numbers`, `u`, `fields`: as the leaf has them.
    - `others`: what else the rule needs at the leaf, by name.
    - `store`: stores a field by its name.
    """
    last = part.module.written_last
    rule = _at(part, plan)
    with at_leaf(part, plan, numbers, u, others, fields) as (now, g, leaf, wide):
        if "advance" in does:
            old = {name: getattr(leaf, name) for name in fields}
            rule.advance(now, g, leaf)
            new = {n: x for n in fields if (x := getattr(leaf, n)) is not old[n]}
            first = [x for n, x in new.items() if n not in last]
            for name, x in new.items():
                value = _written_after(first, x) if name in last else x
                setattr(leaf, name, wide(store(name, value)))
        return rule.direction(now, g, leaf) if "direction" in does else None


def seen_by_refresh(
    part: Part,
    plan: Any,
    numbers: dict[str, Any],
    u: Array,
    others: dict[str, Array],
    fields: dict[str, Any],
) -> Seen:
    """What `refresh` sees of a leaf."""
    with at_leaf(part, plan, numbers, u, others, fields) as (now, g, leaf, _):
        fields = {name: getattr(leaf, name) for name in (*fields, *others)}
        if part.module.over == "matrix":
            return OneByOne(part.module, plan, part.state).seen(now, g, fields)
        return Seen(g, fields, vars(now))


def measured(
    part: Part,
    phase: str,
    plan: Any,
    numbers: dict[str, Any],
    u: Array,
    others: dict[str, Array],
    fields: dict[str, Any],
    factors: dict[str, Any],
) -> Found:
    """What `measure` or `reduce` returns at a leaf; in place of a norm a sum of squares."""
    with at_leaf(part, plan, numbers, u, others, fields) as (now, g, leaf, _):
        found = getattr(_at(part, plan), phase)(now, g, leaf)
        return {
            name: x.squared(factors.get(name)) if isinstance(x, tree.NormOf) else x
            for name, x in found.items()
        }


def finish(
    part: Part,
    found: Sequence[Found],
    again: Again,
    now: SimpleNamespace,
    state: SimpleNamespace,
) -> None:
    """Runs `finish`, in a precision in which all sums, the loss and numbers of the state can be
    had.

    **Arguments:**

    - `part`: the rule.
    - `found`: at each leaf what it has measured.
    - `again`: measures the leaves again, with factors.
    - `now`, `state`: the numbers of this step and of the state, to which it adds.
    """
    old = {name: x for name, x in vars(state).items() if _is_float(x)}
    known = [*old.values(), *jax.tree.leaves(found)]
    if "value" in part.module.needs:
        known.append(now.value)
    dtype = accumulation_dtype(jnp.float32, *(x.dtype for x in known))
    for name, x in vars(now).items():
        setattr(now, name, cast(x, dtype) if _is_float(x) else x)
    for name, x in old.items():
        setattr(state, name, cast(x, dtype))
    with part.scope():
        part.module.finish(now, Sums(found, again, dtype), state)
    for name, x in old.items():
        setattr(state, name, cast(getattr(state, name), x.dtype))


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _at(part: Part, plan: Any) -> Any:
    """The rule with phases that see a whole leaf."""
    rule = part.module
    return OneByOne(rule, plan, part.state) if rule.over == "matrix" else rule


def _written_after(others: list[Array], x: Array) -> Array:
    """`x`, written after others.

    The condition never holds, and XLA does not know. Thus `x` seems to depend on these arrays, so
    XLA writes it last and in place. Otherwise it would copy the array that `x` replaces, which the
    others still read.
    """
    never = jnp.bool_(True)
    for other in others:
        never = never & (other.real > jnp.inf)
    return jnp.where(never, 0, x)
