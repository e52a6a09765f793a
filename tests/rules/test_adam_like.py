"""Adam's later relatives: what is special to each beside its formula.

`test_accuracy.py` has the formulas, and `test_parity.py` the paths of other libraries.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    gradients,
    optax_trajectory,
    params_of,
    slalom_trajectory,
    updates_of,
)

contrib = optax.contrib


@pytest.mark.slow
def test_acprop_galore_and_half_lives_in_double_precision(x64):
    numbers, start = (0.8, 0.9, 1e-30, 1e-30), jnp.zeros(3)
    grads = gradients(start, 6)
    found = updates_of(sl.contrib.ScaleByAcprop(*numbers), grads).at[1:].multiply(0.8)
    theirs, _ = optax_trajectory(contrib.scale_by_acprop(*numbers), start, grads)
    np.testing.assert_allclose(np.diff(theirs, axis=0, prepend=0), found, rtol=1e-9)

    # Of a square matrix stored as in × out, Optax projects the inputs unless it is told otherwise.
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(3)}
    grads = gradients(params, 7)
    numbers = contrib.GaLoreDimensionNumbers(1, 0)
    theirs = contrib.galore(0.05, 2, 3, 0.7, weight_dimension_numbers=numbers)
    ours, _ = slalom_trajectory(sl.contrib.galore(0.05, 2, 3, 0.7), params, grads)
    expected, _ = optax_trajectory(theirs, params, grads)
    # Optax computes the singular vectors in float32.
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)

    decays = sl.schedules.linear_half_life(0.9, 0.9999, 8).values(11)
    half_lives = np.log(0.5) / np.log(decays)
    ends = np.log(0.5) / np.log([0.9, 0.9999])
    np.testing.assert_allclose(half_lives, np.interp(np.arange(11), [0, 8], ends), rtol=1e-10)
    assert decays[0] == 0.9
    assert decays[8] == decays[-1] == 0.9999


def test_adopt_clips_the_norm_of_complex_numbers():
    grads = jnp.asarray([[0.1 + 0.1j], [3.0 + 4.0j]], jnp.complex64)
    updates = updates_of(sl.ScaleByAdopt(0.0), grads)
    np.testing.assert_allclose(updates[1], [0.6 + 0.8j], rtol=1e-6)


@pytest.mark.slow
def test_apollo_draws_other_projections_and_a_rate_of_zero_stops_madgrad():
    params = jnp.asarray([1.0, -1.0])
    tx = sl.contrib.ScaleByMadgrad(0.0)
    updates, state = tx.update(jnp.ones(2), tx.init(params), params, sl.Context(step=0))
    np.testing.assert_array_equal(updates, 0)
    np.testing.assert_array_equal(state.grad_sum, 0)

    grads = {"a": jnp.ones((5, 3, 4)), "b": jnp.ones((5, 3, 4))}
    tx = sl.contrib.ScaleByApollo(1, 2, max_growth=jnp.inf)
    updates = updates_of(tx, grads)
    assert not np.allclose(updates["a"], updates["b"])
    np.testing.assert_allclose(updates["a"][0], updates["a"][1], rtol=1e-5)
    assert not np.allclose(updates["a"][1], updates["a"][2])
    other = updates_of(sl.contrib.ScaleByApollo(1, 2, key=1), grads)
    assert not np.allclose(other["a"][0], updates["a"][0])
    assert tx.notes({"a": jnp.ones((3, 4)), "b": jnp.ones(3)}) == ("4 × 3 at rank 1", None)


class Attention(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    conv: eqx.nn.Conv1d
    output: eqx.nn.Linear

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(5, 4, key=key)
        self.attention = eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=key)
        self.norm = eqx.nn.LayerNorm(4)
        self.conv = eqx.nn.Conv1d(4, 3, 2, key=key)
        self.output = eqx.nn.Linear(3, 5, key=key)


BLOCKS = {
    "embed.weight": (5, 1),
    "attention.query_proj.weight": (2, 1),
    "attention.query_proj.bias": (4,),
    "attention.key_proj.weight": (2, 1),
    "attention.value_proj.weight": (4, 1),
    "attention.output_proj.weight": (4, 1),
    "norm.weight": (1,),
    "norm.bias": (4,),
    "conv.weight": (3, 1, 1),
    "conv.bias": (3, 1),
    "output.weight": (5, 1),
    "output.bias": (5,),
}


@pytest.mark.slow
def test_adam_mini_is_adam_with_a_mean_for_each_token_head_output_and_bias():
    params = params_of(Attention(jax.random.key(0)))
    nu = jax.tree_util.tree_leaves_with_path(sl.contrib.ScaleByAdamMini().init(params).nu)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    shapes = {keystr(path[:-1]): x.shape for path, x in nu}
    assert shapes == BLOCKS

    @eqx.filter_vmap
    def stack(key):
        return Attention(key)

    params = params_of(stack(jax.random.split(jax.random.key(0), 3)))
    nu = jax.tree.leaves(sl.contrib.ScaleByAdamMini().init(params).nu)
    assert [x.shape for x in nu] == [(3, *shape) for shape in BLOCKS.values()]
    told = sl.contrib.ScaleByAdamMini(layout={sl.where.path("output.weight"): "(1o)i"})
    assert told.notes(params)[-2:] == ("15 blocks", "15 blocks")

    # The mean over a block of Adam's means of squares is the mean of the means over the block.
    model = Attention(jax.random.key(0))
    params, grads = params_of(model), gradients(model, 3)
    mini, adam = sl.contrib.ScaleByAdamMini(), sl.ScaleByAdam()
    state, other = mini.init(params), adam.init(params)
    for n in range(3):
        g = jax.tree.map(lambda g, n=n: g[n], grads)
        updates, state = mini.update(g, state)
        _, other = adam.update(g, other)
    columns = (jax.tree.leaves(tree) for tree in (updates, other.mu, other.nu))
    for (path, counts), u, mu, nu in zip(BLOCKS.items(), *columns, strict=True):
        if "query_proj.weight" in path or "key_proj.weight" in path:
            mean = np.repeat(nu.reshape(2, 8).mean(1), 2)[:, None]
        else:
            within = tuple(a for a, n in enumerate(counts) if n == 1)
            mean = np.mean(nu, within, keepdims=True)
        expected = mu / (1 - 0.9**3) / (np.sqrt(mean / (1 - 0.999**3)) + 1e-8)
        np.testing.assert_allclose(u, expected, rtol=1e-4, err_msg=path)


@pytest.mark.slow
def test_galore_projects_each_matrix_of_a_stack_and_only_when_it_is_due():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 3, 5)), jnp.float32)
    tx = sl.contrib.ScaleByGalore(2, 3, layout="soi")
    alone = sl.contrib.ScaleByGalore(2, 3, layout="oi")
    found = updates_of(tx, grads)
    for i in range(2):
        np.testing.assert_allclose(found[:, i], updates_of(alone, grads[:, i]), rtol=1e-4)

    state, projectors = tx.init(grads[0]), []
    for g in grads:
        _, state = tx.update(g, state)
        projectors.append(state.projector[0])
    np.testing.assert_array_equal(projectors[0], projectors[2])
    assert jnp.max(jnp.abs(projectors[3] - projectors[2])) > 0.1
    eye = jnp.broadcast_to(jnp.eye(2), (2, 2, 2))
    np.testing.assert_allclose(jnp.matrix_transpose(projectors[3]) @ projectors[3], eye, atol=1e-6)
    assert tx.notes(grads[0]) == ("2 of 3 × 5 at rank 2",)
    # The first update is P·sign(PᵀG): for a matrix of one row it is the sign of G.
    grads = jnp.asarray([[[3.0, -2.0, 1.0]]])
    np.testing.assert_allclose(
        updates_of(sl.contrib.ScaleByGalore(), grads), jnp.sign(grads), rtol=1e-5
    )

    grads = jnp.ones((8, 16))
    tx = sl.contrib.ScaleByGalore(2)
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert " conditional(" in entry
    assert "lapack" not in entry


def apollo(grads, rank, gap, alpha, *, per_tensor):
    """The updates of APOLLO as the paper states them, for matrices that are not tall."""
    key, (steps, rows, _) = jax.random.fold_in(jax.random.key(0), 0), grads.shape
    m, v, last, updates = 0.0, 0.0, 0.0, []
    for t in range(1, steps + 1):
        drawn = jax.random.normal(jax.random.fold_in(key, (t - 1) // gap), (1, rank, rows))
        r = np.asarray(drawn[0]) / rank**0.5 @ grads[t - 1]
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r**2
        n = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        axis = None if per_tensor else 0
        s = np.linalg.norm(n, axis=axis) / np.linalg.norm(r, axis=axis) * grads[t - 1]
        norm = np.linalg.norm(s)
        if t > 1 and norm > 1.01 * last:
            s *= 1.01 * last / norm
        last = np.linalg.norm(s)
        updates.append(alpha * s)
    return np.stack(updates)


@pytest.mark.slow
@pytest.mark.parametrize("per_tensor", [False, True])
def test_apollo_is_that_of_the_paper(per_tensor, x64):
    grads = np.random.default_rng(0).standard_normal((6, 3, 5))
    grads[3] *= 9
    tx = sl.contrib.ScaleByApollo(2, 3, 0.5, per_tensor)
    expected = apollo(grads, 2, 3, 0.5, per_tensor=per_tensor)
    np.testing.assert_allclose(updates_of(tx, jnp.asarray(grads)), expected, rtol=1e-10)
    # The transpose of a tall matrix.
    tall = updates_of(tx, jnp.asarray(grads.transpose(0, 2, 1)))
    np.testing.assert_allclose(tall, expected.transpose(0, 2, 1), rtol=1e-10)
    free = sl.contrib.ScaleByApollo(2, 3, 0.5, per_tensor, max_growth=jnp.inf)
    assert jnp.max(jnp.abs(updates_of(free, jnp.asarray(grads)) / expected)) > 1.5
