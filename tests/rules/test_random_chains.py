"""Any chain of rules on any tree is what Optax makes of it, and keeps what it was given."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_parity import ROWS, Row

import slalom as sl
from helpers import (
    EXHAUSTIVE,
    SLOW,
    distance,
    drawn,
    gradients,
    kind_of,
    optax_trajectory,
    params_of,
    slalom_trajectory,
    transforms_in,
)


class Box(eqx.Module):
    """A layer with what layers have beside arrays; callable, as layers are."""

    content: Any
    activation: Callable = jax.nn.relu
    size: int = 3

    def __call__(self, x):
        raise AssertionError("a model is a tree here: nobody may call it")


SHAPES = [(), (3,), (1,), (2, 3), (2, 1), (0, 2)]
DTYPES = ["float32", "float32", "bfloat16", "float16"]


@st.composite
def leaves(draw):
    return np.zeros(draw(st.sampled_from(SHAPES)), jnp.dtype(draw(st.sampled_from(DTYPES))))


def containers(below):
    return (
        st.dictionaries(st.sampled_from("abc"), below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.builds(Box, below)
    )


MODELS = containers(st.recursive(leaves() | st.none(), containers, max_leaves=4)).filter(
    lambda model: any(x.size for x in jax.tree.leaves(model) if isinstance(x, np.ndarray))
)

# A sign of what is nearly zero is anything: these stand first, where gradients are far from it.
SIGNS = ("sign", "signum", "lion", "rprop", "yogi")
EXCLUDED = (
    # They know the layout of layers, which Optax does not: `test_layout.py`.
    *("adaptive_grad_clip", "unitwise_clip"),
    # Their functions, written in these tests, mix the dtypes of updates and parameters.
    *("stateless", "stateless_with_tree_map"),
    # Optax rounds more than is compared here: `test_parity.py` compares in double precision.
    *("scale_by_radam", "radam", "scale_by_adam mu_dtype"),
    # What Optax has of these refuses empty arrays.
    *("scale_by_sm3", "scale_by_sm3 numbers", "sm3"),
)


def decides(tx):
    """Whether a part decides when another one runs: what follows would move on idle steps."""
    return any(transforms_in(tx, sl.wrappers.AbstractPacedWrapper))


LINKS = [row for row in ROWS if row.name not in EXCLUDED and not decides(row.ours)]
WRAPPED = [
    Row("every_k", sl.Identity().every_k(2), optax.MultiSteps(optax.identity(), 2)),
    Row(
        "set_to_zero masked",
        sl.SetToZero().mask(sl.where.ndim(0)),
        optax.masked(optax.set_to_zero(), lambda tree: jax.tree.map(lambda x: x.ndim == 0, tree)),
    ),
    # Steps are compared in single precision, where nothing is bfloat16.
    Row(
        "partition",
        sl.Identity().partition({sl.where.dtype(jnp.bfloat16): sl.Trace(0.5)}),
        optax.identity(),
    ),
]
FIRST = st.sampled_from(LINKS)
LATER = st.sampled_from([row for row in LINKS if not any(s in row.name for s in SIGNS)])
CHAINS = (
    st.tuples(FIRST)
    | st.tuples(FIRST, LATER)
    | st.tuples(FIRST, LATER, LATER)
    | st.tuples(FIRST, st.sampled_from(WRAPPED))
)

STEPS = 2


def filled(model, seed):
    """The model with numbers in it: some positive, some negative, none near zero."""
    random = np.random.default_rng(seed)

    def fill(x):
        if not isinstance(x, np.ndarray):
            return x
        drawn = random.uniform(0.5, 1.5, x.shape) * random.choice([-1, 1], x.shape)
        return jnp.asarray(drawn, x.dtype)

    return jax.tree.map(fill, model)


TIERS = [2, pytest.param(25, marks=SLOW), pytest.param(75, marks=EXHAUSTIVE)]


def assert_keeps_kinds_and_walks_as_optax(shapes, rows, seed):
    ours = sl.chain(*(row.ours for row in rows))
    theirs = optax.with_extra_args_support(optax.chain(*(row.theirs for row in rows)))
    model = filled(shapes, seed)

    # In every dtype: what comes out is as what went in, so the second call does not compile.
    opt = sl.Optimizer(ours, model)
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(params, opt):
        whole = eqx.combine(params, rest)
        stepped, opt = opt.step(whole, params, value=1.5)
        return params_of(stepped), opt

    once = step(params, opt)
    twice = step(*once)
    assert kind_of(once) == kind_of(twice) == kind_of((params, opt))
    assert step._cache_size() == 1

    # In single precision: the same path as Optax's.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    grads = gradients(wide, STEPS, seed)
    known = {"value": jnp.linspace(3.0, 1.0, STEPS)}

    @jax.jit
    def both(opt, grads):
        return (
            slalom_trajectory(opt, wide, grads, **known)[0],
            optax_trajectory(theirs, wide, grads, **known)[0],
        )

    mine, others = both(sl.Optimizer(ours, wide), grads)
    start = jax.tree.map(lambda h, p: jnp.broadcast_to(p, h.shape), others, wide)
    mine, others, start = ([x for x in jax.tree.leaves(t) if x.size] for t in (mine, others, start))
    assert distance(mine, others) <= 1e-4 * distance(others, start) + 1e-6


@pytest.mark.filterwarnings("ignore:.*together they ascend", "ignore:.* comes after '")
@pytest.mark.parametrize("examples", TIERS)
def test_any_chain_on_any_tree(examples):
    # No shrinking: each try compiles two programs, and the chains are short as they are.
    options = {"examples": examples, "phases": [hypothesis.Phase.generate]}
    drawn(MODELS, CHAINS, st.integers(0, 9), **options)(assert_keeps_kinds_and_walks_as_optax)()
