"""How state and parameters are stored changes no bit, for any row of the table.

Codecs that lose nothing, write policies for parameters that need none, and observers are compared
with the transform alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, loss_of_any, transforms_in
from slalom._core.protocol.parts import Part
from table import GRADIENT_ROWS, rows

STEPS = 3


class whole(sl.codecs.AbstractCodec):
    """A codec that loses nothing, and that the engine takes for one of blocks."""

    def encode(self, x, spec, bits=None):
        return {"codes": x.astype(spec.dtype)}

    def decode(self, arrays, spec):
        return arrays["codes"]


def start(dtype=jnp.float32):
    return {
        "w": jnp.linspace(-1, 1, 6).reshape(2, 3).astype(dtype),
        "b": jnp.linspace(0.5, 1, 3).astype(dtype),
    }


def gradients(dtype=jnp.float32):
    """Of several steps, in numbers that bfloat16 can hold."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield {
            name: jnp.asarray(rng.integers(-64, 64, p.shape) / 32, dtype)
            for name, p in start().items()
        }


def trained(tx):
    """The parameters after a few steps."""
    params = start()
    opt = sl.Optimizer(tx, params)

    @jax.jit
    def step(params, opt, grads):
        known = {"value": loss_of_any(params), "grad": grads, "value_fn": loss_of_any}
        return opt.step(params, grads, **known)

    for grads in gradients():
        params, opt = step(params, opt, grads)
    return params


def stores(tx):
    return any(transforms_in(tx, sl.wrappers.Store))


def writes(tx):
    return any(transforms_in(tx, sl.wrappers.Write))


CONTRACTED = sl.ScaleByStddev
"""Its variance is a sum of two products. A program that decodes has it in another fusion, where
LLVM contracts one of them with the sum even without optimizations: a difference of one rounding."""


def assert_same_bits(left, right, roundings=0):
    """Of programs that LLVM does not optimize: it contracts a product and a sum in one program, and
    not in another one that computes the same."""
    assert_close(left, right, rtol=roundings * 2**-23, atol=0)


WAYS = {
    "store": lambda tx: tx.store(whole(), min_size=1),
    "write": lambda tx: tx.write("master"),
    "write, store": lambda tx: tx.write("master").store(whole(), min_size=1),
    "store, write": lambda tx: tx.store(whole(), min_size=1).write("master"),
    "record": lambda tx: tx.record(),
}


@pytest.fixture
def contracted_alike(compiled_as_users):
    """LLVM contracts products and sums in one program, and not in another that computes the same,
    and XLA's older emitters do so even without optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def assert_changes_no_bit(tx, ways):
    if stores(tx) or writes(tx):
        pytest.skip("this row has a codec or a policy of its own")
    alone = trained(tx)
    for how in ways:
        scales = any(transforms_in(tx, sl.wrappers.ScaleLoss))
        if how != "record" or not scales:  # which would show gradients that are scaled
            roundings = STEPS if any(transforms_in(tx, CONTRACTED)) else 0
            assert_same_bits(trained(WAYS[how](tx)), alone, roundings)


@rows(GRADIENT_ROWS, everyday=("ScaleByAdam",))
@pytest.mark.usefixtures("contracted_alike")
def test_ways_to_store_and_observers_change_no_bit(row):
    # Two of them for each row, so that each way has rows of each kind.
    first = GRADIENT_ROWS.index(row.name)
    assert_changes_no_bit(row.tx, [[*WAYS][(first + i) % len(WAYS)] for i in range(2)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", GRADIENT_ROWS, indirect=True)
@pytest.mark.usefixtures("contracted_alike")
def test_no_way_to_store_and_no_observer_changes_a_bit(row):
    assert_changes_no_bit(row.tx, WAYS)


@rows(GRADIENT_ROWS, everyday=("ScaleByAdam",))
def test_half_precision_parameters_with_master_weights_follow_single_precision(row):
    tx = row.tx
    if writes(tx):
        pytest.skip("this row has a policy already")
    if stores(tx):
        pytest.skip("its codes are rounded with random bits that depend on paths")
    own = sl.wrappers.AbstractParameterWriter | sl.wrappers.Outer
    if any(transforms_in(tx, own)):
        pytest.skip("it keeps parameters of its own, so it goes around `.write`")
    needs = {name for part in transforms_in(tx) for name in part.needs}
    if needs & {"value_fn", "grad_fn"}:
        pytest.skip("the loss is that of the model, whose parameters are rounded")
    if any(transforms_in(tx, sl.Stateless | sl.StatelessPerLeaf)):
        pytest.skip("the user's function sees gradients in the dtype that they have")
    follow_single_precision(tx)


def follow_single_precision(row):
    params, state = start(), row.init(start())
    tx = row.write("master")
    rounded = start(jnp.bfloat16)
    stored = dataclasses.replace(tx.init(rounded), inner=state, master=params)

    def known(step, grads):
        # The loss of the rounded parameters is another one.
        return sl.Context(step=step, value=1 / (1 + step.astype(jnp.float32)), grad=grads)

    full = jax.jit(lambda i, g, state, params: row.step(g, state, params, known(i, g)))
    half = jax.jit(lambda i, g, state, params: tx.step(g, state, params, known(i, g)))
    for i, (wide, narrow) in enumerate(zip(gradients(), gradients(jnp.bfloat16), strict=True)):
        params, state = full(jnp.int32(i), wide, state, params)
        rounded, stored = half(jnp.int32(i), narrow, stored, rounded)
    here = Part.root(tx, stored, params=rounded)
    assert_same_bits(tx.full_params(here), params)
