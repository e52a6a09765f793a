"""Every wrapper around rules, and pairs of wrappers, against the same written plainly.

The plain form computes everything in every step and selects what counts: no branches, no
walk, no clocks handed on by a context.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import (
    EXHAUSTIVE,
    SLOW,
    Falling,
    assert_close,
    gradients,
    sampled,
    trajectory,
    transforms_in,
)
from table import RULES

PARAMS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[1.0, -0.5], [0.25, 2.0]])}
STEPS, BAD = 7, 4
"""In one step no gradient is finite; after it a window of two begins."""
GRADS = gradients(PARAMS, STEPS)
LOSSES = jnp.linspace(2.0, 1.0, STEPS)


class Plain(NamedTuple):
    """`init(params) -> state` and `update(g, state, p, step, value) -> (updates, state)`."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    has_updated: Callable[[Any], Any] = lambda state: True
    """Whether the last update was one, and no idle step: lookahead counts those."""


def plain(tx):
    def update(g, s, p, t, value):
        return tx.update(g, s, p, sl.Context(step=t, value=value))

    return Plain(tx.init, update, tx.has_updated)


def select(condition, a, b):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


zeros = functools.partial(jax.tree.map, jnp.zeros_like)
plus = functools.partial(jax.tree.map, jnp.add)
minus = functools.partial(jax.tree.map, jnp.subtract)


def on(keys, inner, elsewhere):
    """Some entries of the dict by one transform, the others by another."""

    def split(tree):
        return (
            {k: v for k, v in tree.items() if k in keys},
            {k: v for k, v in tree.items() if k not in keys},
        )

    def init(params):
        return tuple(x.init(p) for x, p in zip((inner, elsewhere), split(params), strict=True))

    def update(g, state, p, t, value):
        pieces = zip((inner, elsewhere), split(g), state, split(p), strict=True)
        made = [x.update(g, s, p, t, value) for x, g, s, p in pieces]
        return made[0][0] | made[1][0], (made[0][1], made[1][1])

    def has_updated(state):
        return inner.has_updated(state[0]) | elsewhere.has_updated(state[1])

    return Plain(init, update, has_updated)


PASS = Plain(lambda params: None, lambda g, s, p, t, value: (g, s), lambda s: True)
ZERO = Plain(lambda params: None, lambda g, s, p, t, value: (zeros(g), s), lambda s: False)


def when(condition, inner, otherwise):
    """The inner transform where a condition on the step and the gradients holds."""

    def init(params):
        return jnp.int32(0), jnp.array(False), inner.init(params)

    def update(g, state, p, t, value):
        count, _, old = state
        made, new = inner.update(g, old, p, count, value)
        holds = condition(t, g)
        updates = select(holds, made, otherwise(g))
        return updates, (count + holds.astype(jnp.int32), holds, select(holds, new, old))

    def has_updated(state):
        _, held, inner_state = state
        return jnp.where(held, inner.has_updated(inner_state), otherwise is not zeros)

    return Plain(init, update, has_updated)


def finite(t, g):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(g)]))


def every_2(inner):
    def init(params):
        return jnp.int32(0), zeros(params), jnp.float32(0), inner.init(params)

    def update(g, state, p, t, value):
        n, held, loss, old = state
        last = n % 2 == 1
        # In the first half of a window `held` is of the window before.
        mean = jax.tree.map(lambda h, g: (h + g) / 2, held, g)
        made, new = inner.update(mean, old, p, n // 2, (loss + value) / 2)
        return select(last, made, zeros(g)), (n + 1, g, value, select(last, new, old))

    def has_updated(state):
        n, _, _, inner_state = state
        return (n % 2 == 0) & inner.has_updated(inner_state)

    return Plain(init, update, has_updated)


def lookahead(inner):
    def init(params):
        return jnp.int32(0), params, inner.init(params)

    def update(g, state, p, t, value):
        n, slow, old = state
        made, new = inner.update(g, old, p, t, value)
        emitted = jnp.asarray(inner.has_updated(new))
        n = n + emitted.astype(jnp.int32)
        synced = jax.tree.map(lambda s, f: s + 0.25 * (f - s), slow, plus(p, made))
        sync = emitted & (n % 2 == 0)
        return select(sync, minus(synced, p), made), (n, select(sync, synced, slow), new)

    return Plain(init, update, lambda state: inner.has_updated(state[-1]))


def driven(tx):
    """The first number of a transform put in by hand."""
    name = first_number(tx)

    def where(tx):
        return getattr(next(part for part in transforms_in(tx) if hasattr(part, name)), name)

    def at(rate):
        return plain(eqx.tree_at(where, tx, rate, is_leaf=lambda x: x is where(tx)))

    def init(params):
        return jnp.ones(()), tx.init(params)

    def update(g, state, p, t, value):
        scale = state[0] * 0.75
        made, inner = at(0.5 * scale).update(g, state[1], p, t, value)
        return made, (scale, inner)

    return Plain(init, update, lambda state: tx.has_updated(state[1]))


def first_number(tx):
    return next(
        field.name
        for part in transforms_in(tx)
        for field in dataclasses.fields(part)
        if isinstance(getattr(part, field.name), float | sl.schedules.AbstractSchedule)
    )


W, SGD = sl.where.path("w"), sl.sgd(0.3, 0.5)
odd = lambda context, updates: context.step % 2 == 1  # noqa: E731
is_odd = lambda t, g: t % 2 == 1  # noqa: E731

# From a transform to it wrapped, and from the plain form of one to that of the other.
WRAPPERS = {
    "mask": (lambda tx: tx.mask(W), lambda x: on("w", x, PASS)),
    "only": (lambda tx: tx.only(W), lambda x: on("w", x, ZERO)),
    "partition": (lambda tx: tx.partition({W: SGD}), lambda x: on("w", plain(SGD), x)),
    "every_k": (lambda tx: tx.every_k(2), every_2),
    "if_finite": (lambda tx: tx.if_finite(), lambda x: when(finite, x, zeros)),
    "when zero": (lambda tx: tx.when(odd, otherwise="zero"), lambda x: when(is_odd, x, zeros)),
    "when pass": (lambda tx: tx.when(odd), lambda x: when(is_odd, x, lambda g: g)),
    "lookahead": (lambda tx: tx.lookahead(2, 0.25), lookahead),
    "average": (lambda tx: tx.average(0.9), lambda x: x),
    "record": (lambda tx: tx.record(), lambda x: x),
    "split_complex": (lambda tx: tx.split_complex(), lambda x: x),
}
# These look inside of a transform, so they stand around a row itself.
INNERMOST = {
    "flatten": (lambda tx: tx.flatten(), plain),
    "drive": (lambda tx: tx.drive({first_number(tx): Falling()}), driven),
}
NAMES = [*INNERMOST, *WRAPPERS]

# A moment, a loss and sums over all leaves, a schedule, and the first parameters.
ROWS = ("ScaleByAdam", "ScaleByMomo", "ScaleByLearningRate, scheduled", "ScaleByCocob")
# Leaf by leaf, with a history, with a key and a mask, with a wrapper of its own, and others.
MORE_ROWS = (
    *("ScaleByFactoredRms, factored", "ScaleByProdigy, uncorrected", "ScaleByLbfgs", "ScaleByKron"),
    *("ScaleByShampoo, grafted blocks", "ScaleByMars", "ScaleByIvon", "Orthogonalize, aol"),
)
REFUSED = {("lookahead", "split_complex"), ("average", "split_complex")}
PAIRS = [
    (inner, outer)
    for inner, outer in itertools.product(NAMES, WRAPPERS)
    if inner != outer and (inner, outer) not in REFUSED
]
# They cover every wrapper.
EVERYDAY = (
    ("flatten", "every_k"),
    ("drive", "if_finite"),
    ("mask", "lookahead"),
    ("when pass", "record"),
    ("only", "when zero"),
    ("partition", "average"),
    ("every_k", "split_complex"),
)


def in_ci(inner, outer):
    """Whether CI has a pair this way round: each pair is there once, half of them inverted."""
    if (outer, inner) not in PAIRS:
        return True
    inverted = (NAMES.index(inner) + NAMES.index(outer)) % 2 == 1
    return (outer, inner) not in EVERYDAY and inverted == (NAMES.index(inner) > NAMES.index(outer))


def pairs():
    for i, pair in enumerate(PAIRS):
        tier = () if pair in EVERYDAY else SLOW if in_ci(*pair) else EXHAUSTIVE
        yield pytest.param(ROWS[i % 4], pair, id=" in ".join(pair), marks=tier)


def assert_is_its_plain_form(row, wrappers, verb):
    tx, expected = RULES[row], plain(RULES[row])
    for wrapper in wrappers:
        if wrapper in INNERMOST:
            wrap, write = INNERMOST[wrapper]
            expected = write(tx)
        else:
            wrap, write = WRAPPERS[wrapper]
            expected = write(expected)
        tx = wrap(tx)
    grads = GRADS
    if "if_finite" in wrappers:
        grads = jax.tree.map(lambda g: g.at[BAD].set(jnp.nan), grads)

    def ours(params, state, g, value, t):
        result, state = getattr(tx, verb)(g, state, params, sl.Context(step=t, value=value))
        return result if verb == "step" else plus(params, result), state

    def theirs(params, state, g, value, t):
        updates, state = expected.update(g, state, params, t, value)
        return plus(params, updates), state

    @jax.jit
    def both():
        inputs = (grads, LOSSES, jnp.arange(STEPS, dtype=jnp.int32))
        path, _ = trajectory(ours, PARAMS, tx.init(PARAMS), inputs)
        return path, trajectory(theirs, PARAMS, expected.init(PARAMS), inputs)[0]

    assert_close(*both(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("row", "pair"), list(pairs()))
def test_a_pair_of_wrappers_is_its_plain_form(row, pair):
    assert_is_its_plain_form(row, pair, ("step", "update")[sum(map(NAMES.index, pair)) // 2 % 2])


# `flatten` takes only rules that act number by number. After a step that is skipped, IVON draws
# another sample, which `test_hessian_estimates.py` is about. Both parts of a graft have a `b2`, so
# that name drives neither.
SKIPPING = ("if_finite", "when zero", "when pass")
LEFT_OUT = [("drive", "ScaleByShampoo, grafted blocks"), *((w, "ScaleByIvon") for w in SKIPPING)]
ALONE = [
    (wrapper, row)
    for wrapper, row in itertools.product(NAMES, MORE_ROWS)
    if wrapper != "flatten" and (wrapper, row) not in LEFT_OUT
]


@pytest.mark.parametrize("case", sampled(ALONE), ids=" of ".join)
def test_a_wrapped_rule_is_its_plain_form(case):
    wrapper, row = case
    assert_is_its_plain_form(row, (wrapper,), ("step", "update")[MORE_ROWS.index(row) % 2])


def test_the_pairs_of_every_day_and_of_ci_cover_all():
    assert {*itertools.chain(*EVERYDAY)} == {*NAMES}
    in_tiers = {frozenset(pair) for pair in PAIRS if pair in EVERYDAY or in_ci(*pair)}
    assert in_tiers == {frozenset(pair) for pair in PAIRS}
