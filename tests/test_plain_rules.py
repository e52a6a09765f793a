"""What is special about the rules that adapt no scale of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

# --- functions ------------------------------------------------------------------------------


def test_a_function_is_told_when_there_are_no_parameters():
    tree = {"w": jnp.array([1.0, -2.0])}
    for tx in (
        sl.Stateless(lambda u, p: u if p is None else p),
        sl.StatelessPerLeaf(lambda u, p: u if p is None else p),
    ):
        np.testing.assert_array_equal(tx.update(tree, None)[0]["w"], tree["w"])
        params = {"w": jnp.array([3.0, 4.0])}
        np.testing.assert_array_equal(tx.update(tree, None, params)[0]["w"], params["w"])


@pytest.mark.parametrize(
    "tx",
    [
        sl.Stateless(lambda u, p: {"w": u["w"].sum()}),
        sl.StatelessPerLeaf(lambda u, p: u.sum()),
    ],
)
def test_a_function_that_changes_a_shape_is_refused(tx):
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\).*shape \(\)"):
        tx.update({"w": jnp.ones(2)}, None)


def test_what_a_function_returns_is_wide_and_strongly_typed():
    tx = sl.Stateless(lambda u, p: jax.tree.map(lambda x: x * 2, u))
    (made,), _ = tx.update([jnp.ones(2, jnp.bfloat16)], None)
    assert made.dtype == jnp.float32
    assert not made.weak_type


# --- the moving average ---------------------------------------------------------------------


def test_a_debiased_average_of_a_constant_is_the_constant():
    tx = sl.Ema(0.999)
    g = {"w": jnp.array([0.3, -7.0])}
    state = tx.init(g)
    for _ in range(3):
        updates, state = tx.update(g, state)
        np.testing.assert_allclose(updates["w"], g["w"], rtol=1e-6)
