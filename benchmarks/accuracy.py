"""Measures the error of one step of each rule, in units in the last place.

    python -m benchmarks.accuracy --docs docs/guides/precision.md

The state is drawn at random for each age and size of the gradients, one step is taken, and its
update is compared with the formula in `formulas.py`, evaluated with 64 bits of precision.
"""

import argparse
import functools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl
from slalom.tree.dtypes import accumulation_dtype, real_dtype

from .docs import END, replace_between
from .formulas import ROWS, Row

BEGIN = "<!-- figures: python -m benchmarks.accuracy --docs docs/guides/precision.md -->"
SHAPE = (3, 4)
AGES = (1, 2, 1_000, 10**6, 2**31 - 2)
SIZES = (1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30)
DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
BY_AGE = "age"


class Errors(NamedTuple):
    """The largest errors over all cells, in units in the last place of the parameter's dtype."""

    update: float
    state: float
    """In units of the dtype in which each array of the state is stored."""


def measure(
    row: Row, dtype: str, ages: Iterable[int] = AGES, sizes: Iterable[float] = SIZES
) -> Errors:
    """The errors of one step of a rule in one dtype."""
    with jax.enable_x64(dtype == "float64"):
        sizes = [size for size in sizes if _holds(dtype, size)]
        if dtype != "float64":
            sizes = [size for size in sizes if size < row.largest]
        cells = [(t, size) for size in sizes for t in ages]
        return _measure(row, jnp.dtype(dtype), cells)


def _holds(dtype: str, size: float) -> bool:
    """Whether numbers of this size are normal numbers, with room for a factor of 4."""
    limits = jnp.finfo(dtype)
    return 4 * float(limits.tiny) <= size <= float(limits.max) / 4


def _measure(row: Row, dtype: Any, cells: list[tuple[int, float]]) -> Errors:
    wide = accumulation_dtype(dtype)
    limits = jnp.finfo(wide)
    rng = np.random.default_rng(0)
    h = numbers(row.rule, limits)
    empty = row.rule.init(jnp.zeros(SHAPE, dtype))
    givens, states = [], []
    for t, size in cells:
        # Gradients and their means have equal signs, so that no sum cancels.
        phase = _phases(rng, dtype)
        grads = (size * rng.uniform(2, 3, SHAPE) * phase).astype(dtype)
        params = (rng.uniform(0.5, 1.5, SHAPE) * phase).astype(dtype)
        draw = functools.partial(_drawn, rng, t, phase, limits)
        state = {
            name: jax.tree.map(
                functools.partial(draw, size**power + row.least, power < 2), getattr(empty, name)
            )
            for name, power in row.state.items()
        }
        givens.append((grads, params, np.asarray(size, real_dtype(wide))))
        states.append(state)

    def stack(trees: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)

    def step(given: Any, arrays: dict[str, Any], age: Any) -> Any:
        grads, params, value = given
        state = empty
        if state is not None:
            names = list(arrays)
            values = [arrays[name] for name in names]
            if getattr(state, "age", None) is not None:
                names, values = [*names, BY_AGE], [*values, age]
            state = eqx.tree_at(lambda s: [getattr(s, n) for n in names], state, values)
        updates, state = row.rule.update(grads, state, params, sl.Context(value=value, step=0))
        return updates, {name: getattr(state, name) for name in arrays}

    ages = jnp.asarray([t - 1 for t, _ in cells], jnp.int32)
    # Indexing arrays of JAX would run a program for each.
    updates, news = jax.device_get(jax.jit(jax.vmap(step))(stack(givens), stack(states), ages))
    worst = [0.0, 0.0]
    with np.errstate(all="ignore"):
        for i, (t, _) in enumerate(cells):
            grads, params, _ = map(_exact, givens[i])
            old = SimpleNamespace(**jax.tree.map(_exact, states[i]))
            u, new = row.formula(h, np.longdouble(t), grads, params, old)
            worst[0] = max(worst[0], _error(updates[i], u, dtype, wide))
            for name in new:
                got = jax.tree.leaves(jax.tree.map(lambda x, i=i: x[i], news[name]))
                for x, exact in zip(got, jax.tree.leaves(new[name]), strict=True):
                    worst[1] = max(worst[1], _error(x, exact, x.dtype, wide))
    return Errors(*worst)


def numbers(rule: Any, limits: Any) -> SimpleNamespace:
    """The fields of a rule as it computes with them, and the limits of its numbers."""
    largest, tiny = (np.longdouble(float(x)) for x in (limits.max, limits.tiny))

    def number(x: Any) -> Any:
        plain = isinstance(x, float) and not isinstance(x, bool)
        return np.longdouble(np.asarray(x, limits.dtype)) if plain else x

    return SimpleNamespace(
        **{name: number(x) for name, x in vars(rule).items()},
        largest=largest,
        square=lambda x: np.minimum(np.abs(x) ** 2, largest / 4),
        positive=lambda x: np.maximum(x, tiny),
    )


def _phases(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.exp(2j * np.pi * rng.uniform(size=SHAPE))
    return rng.choice([-1.0, 1.0], SHAPE)


def _drawn(
    rng: np.random.Generator,
    t: int,
    phase: np.ndarray,
    limits: Any,
    size: float,
    signed: bool,
    like: Any,
) -> np.ndarray:
    """A random array of the state before the step of age t: 0 at first, and at most as large as the
    bound of squares allows. Means of updates have signs, those of squares are positive."""
    filled = min((t - 1) / 1_000, 1)
    values = filled * min(size, float(limits.max) / 16) * rng.uniform(0.5, 1.5, like.shape)
    values = np.where(values < float(limits.tiny), 0, values)
    signed = signed and like.shape == SHAPE
    complex_ = jnp.issubdtype(like.dtype, jnp.complexfloating)
    if signed and (complex_ or not np.iscomplexobj(phase)):
        values = values * phase
    return values.astype(like.dtype)


def _exact(x: Any) -> Any:
    x = np.asarray(x)
    if np.iscomplexobj(x):
        return x.astype(np.clongdouble)
    return x.astype(np.float64).astype(np.longdouble)


def _error(x: Any, exact: Any, dtype: Any, wide: Any) -> float:
    """The largest error in units in the last place of a dtype.

    Numbers that the wide dtype cannot hold are left out if they are too large, and count from its
    smallest normal number on if they are too small.
    """
    limits = jnp.finfo(wide)
    eps = float(jnp.finfo(dtype).eps)
    size = np.abs(exact)
    fits = size < np.minimum(
        float(limits.max), float(jnp.finfo(dtype).max) if x.dtype == dtype else np.inf
    )
    off = np.abs(_exact(x) - exact) / (eps * np.maximum(size, float(limits.tiny) / eps))
    off = np.where(fits, off, 0)
    return float(np.max(np.where(np.isnan(off), np.inf, off), initial=0))


DECAYS = (0.5, 0.9, 0.95, 0.98, 0.99)


def shortfalls(decays: Iterable[float], dtype: str, steps: int = 10_000) -> np.ndarray:
    """How far stored means of a constant gradient stay behind it, at most, relative to it."""
    grads = jnp.linspace(1.0, 2.0, 128)

    @jax.jit
    @jax.vmap
    def run(decay: Any) -> Any:
        tx = sl.Ema(decay, accumulator_dtype=jnp.dtype(dtype))
        return jax.lax.fori_loop(0, steps, lambda _, s: tx.update(grads, s)[1], tx.init(grads)).ema

    means = np.asarray(run(jnp.asarray([*decays])), np.float64)
    return np.max(np.abs(means / np.asarray(grads) - 1), axis=1)


def figures(ages: Iterable[int] = AGES, sizes: Iterable[float] = SIZES) -> str:
    """Both tables, as Markdown."""
    lines = [_line("", DTYPES), _line("---", ["---:"] * len(DTYPES))]
    for name, row in ROWS.items():
        if isinstance(row.rule, sl.wrappers.Average):
            continue  # its update is that of the transform in it
        errors = [measure(row, dtype, ages, sizes).update for dtype in DTYPES]
        lines.append(_line(name, [_number(e) for e in errors]))
    stored = ("float32", "bfloat16")
    lines += ["", _line("decay", stored), _line("---", ["---:"] * len(stored))]
    columns = (shortfalls(DECAYS, dtype) for dtype in stored)
    for decay, *found in zip(DECAYS, *columns, strict=True):
        lines.append(_line(str(decay), [f"{x:.2g}" for x in found]))
    return "\n".join(lines) + "\n"


def _line(head: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join((head, *cells))} |"


def _number(error: float) -> str:
    return f"{error:.1f}" if error >= 0.05 else "< 0.1"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--docs", type=Path, help="write the figures into this page")
    args = parser.parse_args(argv)
    text = figures()
    print(text)
    if args.docs is not None:
        replace_between(args.docs, BEGIN, END, lambda: text)


if __name__ == "__main__":
    main()
