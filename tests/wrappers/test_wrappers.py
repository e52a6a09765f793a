"""Every wrapper around rules and recipes, and pairs of wrappers, against the same written plainly.

The plain form computes everything in every step and selects what counts: no branches, no
walk, no clocks handed on by a context. Rows and pairs are drawn from the table by a fixed seed.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import gradients
from slalom._core.fields.declare import hyperparameter_fields
from slalom._core.fields.hyperparams import targets
from slalom._core.state.walk import transforms
from table import RECIPES, RULES

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


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def plus(a, b):
    return jax.tree.map(lambda x, y: x + y, a, b)


def minus(a, b):
    return jax.tree.map(lambda x, y: x - y, a, b)


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


class Falling(sl.schedules.AbstractStatefulSchedule):
    def init(self):
        return jnp.ones(())

    def update(self, state, context):
        return state * 0.75

    def value(self, state):
        return 0.5 * state


def driven(tx):
    """The first hyperparameter of a transform put in by hand."""
    ((_, part, field),) = targets(tx, first_number(tx))

    def at(rate):
        where = lambda t: getattr(part.get(t), field.name)  # noqa: E731
        return plain(eqx.tree_at(where, tx, rate, is_leaf=lambda x: x is where(tx)))

    def init(params):
        return jnp.ones(()), tx.init(params)

    def update(g, state, p, t, value):
        scale = state[0] * 0.75
        made, inner = at(0.5 * scale).update(g, state[1], p, t, value)
        return made, (scale, inner)

    return Plain(init, update, lambda state: tx.has_updated(state[1]))


def first_number(tx):
    for part in transforms(tx):
        for field in hyperparameter_fields(part.module):
            if getattr(part.module, field.name) is not None:
                return ".".join((*part.path, field.name))
    raise ValueError("there is no number to drive")


W = sl.where.path("w")
odd = lambda context, updates: context.step % 2 == 1  # noqa: E731

# From a transform to it wrapped, and from the plain form of one to that of the other.
WRAPPERS = {
    "mask": (lambda tx: tx.mask(W), lambda x: on("w", x, PASS)),
    "only": (lambda tx: tx.only(W), lambda x: on("w", x, ZERO)),
    "partition": (
        lambda tx: tx.partition({W: sl.sgd(0.3, 0.5)}),
        lambda x: on("w", plain(sl.sgd(0.3, 0.5)), x),
    ),
    "every_k": (lambda tx: tx.every_k(2), every_2),
    "if_finite": (lambda tx: tx.if_finite(), lambda x: when(finite, x, zeros)),
    "when zero": (
        lambda tx: tx.when(odd, otherwise="zero"),
        lambda x: when(lambda t, g: t % 2 == 1, x, zeros),
    ),
    "when pass": (
        lambda tx: tx.when(odd),
        lambda x: when(lambda t, g: t % 2 == 1, x, lambda g: g),
    ),
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
ROWS = {
    name: tx
    for name, tx in (RULES | RECIPES).items()
    if all(
        set(part.module.needs) <= {"params", "value"} and not part.module.per_example
        for part in transforms(tx)
    )
}


def made(row, wrappers):
    """A row wrapped, and the same written plainly."""
    tx, expected = ROWS[row], plain(ROWS[row])
    for wrapper in wrappers:
        if wrapper in INNERMOST:
            wrap, write = INNERMOST[wrapper]
            expected = write(tx)
        else:
            wrap, write = WRAPPERS[wrapper]
            expected = write(expected)
        tx = wrap(tx)
    return tx, expected


def fits(row, *wrappers):
    """Whether the wrappers take what they get at all: what they refuse is tested elsewhere."""
    try:
        made(row, wrappers)
    except ValueError:
        return False
    return True


def drawn():
    """Rows for every wrapper, and for many pairs of wrappers, innermost first."""
    random = np.random.default_rng(0)
    names = list(ROWS)
    for wrapper in WRAPPERS:
        for row in random.choice(names, 4, replace=False):
            yield (str(row), wrapper)
    for wrapper in INNERMOST:
        among = (name for name in random.permutation(names) if fits(name, wrapper))
        for row in itertools.islice(among, 4):
            yield (str(row), wrapper)
    pairs = [(a, b) for a in (*WRAPPERS, *INNERMOST) for b in WRAPPERS if a != b]
    # Every wrapper once on the outside and once inside, then some more. Lookahead inside of
    # `split_complex` is refused.
    chosen = [(a, b) for a, b in zip([*WRAPPERS], [*WRAPPERS][3:] + [*WRAPPERS][:3], strict=True)]
    chosen += [("every_k", "split_complex")]
    chosen += [pairs[i] for i in random.choice(len(pairs), 16, replace=False)]
    for first, second in chosen:
        among = (name for name in random.permutation(names) if fits(name, first, second))
        for row in itertools.islice(among, 1):
            yield (str(row), first, second)


CASES = list(dict.fromkeys(drawn()))


def numbered():
    """Half of the cases for every day, by steps and by updates in turn."""
    for i, case in enumerate(CASES):
        marks = pytest.mark.slow if i // 2 % 2 else ()
        yield pytest.param(i, case, id=" ".join(case), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("i", "case"), list(numbered()))
def test_a_wrapped_transform_is_its_plain_form(i, case):
    row, *wrappers = case
    tx, expected = made(row, wrappers)
    grads = GRADS
    if "if_finite" in wrappers:
        grads = jax.tree.map(lambda g: g.at[BAD].set(jnp.nan), grads)
    verb = ("step", "update")[i % 2]

    def ours(carry, given):
        params, state = carry
        g, value, t = given
        context = sl.Context(step=t, value=value)
        result, state = getattr(tx, verb)(g, state, params, context)
        params = result if verb == "step" else plus(params, result)
        return (params, state), params

    def theirs(carry, given):
        params, state = carry
        g, value, t = given
        updates, state = expected.update(g, state, params, t, value)
        params = plus(params, updates)
        return (params, state), params

    @jax.jit
    def both():
        inputs = (grads, LOSSES, jnp.arange(STEPS, dtype=jnp.int32))
        return (
            jax.lax.scan(ours, (PARAMS, tx.init(PARAMS)), inputs)[1],
            jax.lax.scan(theirs, (PARAMS, expected.init(PARAMS)), inputs)[1],
        )

    a, b = both()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_every_wrapper_is_drawn_alone_and_inside_and_outside_of_another():
    alone = {case[1] for case in CASES if len(case) == 2}
    assert alone == {*WRAPPERS, *INNERMOST}
    pairs = [case for case in CASES if len(case) == 3]
    assert {case[1] for case in pairs} >= set(WRAPPERS)
    assert {case[2] for case in pairs} == set(WRAPPERS)
