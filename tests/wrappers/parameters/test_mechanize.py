"""`tx.mechanize()`: the scale that Mechanic learns is that of Optax."""

import jax
import jax.numpy as jnp
import optax
import pytest

import slalom as sl
from helpers import (
    assert_same_path,
    compiled_step,
    gradients,
    nested_dict,
    optax_trajectory,
    slalom_trajectory,
)


@pytest.mark.slow
def test_optax_takes_the_same_steps(x64):
    model = nested_dict(jax.random.key(0), jnp.float64)
    grads = gradients(model, 8)
    options = {"s_init": 1e-2, "num_betas": 3}
    ours, opt = slalom_trajectory(sl.adam(1.0).mechanize(**options), model, grads)
    theirs, state = optax_trajectory(
        optax.contrib.mechanize(optax.adam(1.0), **options), model, grads
    )
    assert_same_path(ours, theirs, model, 1e-8)
    assert jnp.allclose(opt.state.scales, state.s, rtol=1e-8)


@pytest.mark.slow
def test_idle_steps_neither_move_nor_learn():
    model = nested_dict(jax.random.key(0))
    grads = gradients(model, 2)
    tx = sl.sgd(1.0).every_k(2).mechanize()
    history, opt = slalom_trajectory(tx, model, grads)
    assert_same_path(
        jax.tree.map(lambda h: h[:1], history), jax.tree.map(lambda x: x[None], model), model, 0
    )
    assert jnp.all(opt.state.variance == 0)  # nothing has moved yet when the first update is made


def test_it_learns_what_only_a_master_copy_can_hold():
    # The steps from s₀ = 1e-6 are far below half a unit in the last place of bfloat16.
    def learned(dtype, wrap):
        w = jnp.full(3, 0.75, dtype)

        def body(carry, _):
            w, opt = carry
            return opt.step(w, w), None

        tx = wrap(sl.sgd(1.0).mechanize())
        run = jax.jit(lambda *carry: jax.lax.scan(body, carry, None, 300)[0])
        w, opt = run(w, sl.Optimizer(tx, w))
        return opt.eval_params(w, full_precision=True)

    single = learned(jnp.float32, lambda tx: tx)
    assert jnp.max(jnp.abs(single)) < 1e-3
    half = learned(jnp.bfloat16, lambda tx: tx.write("master"))
    assert jnp.max(jnp.abs(half)) < 1e-3


@pytest.mark.slow
def test_scratch_is_a_number_broadcast_to_one_leaf():
    # Rules that square their gradients included. In a sum, XLA keeps a broadcast in memory.
    params = {name: jnp.ones((128, 256)) for name in "abc"}
    memory = compiled_step(sl.adamw(1.0).mechanize(), params).memory_analysis()
    assert memory.temp_size_in_bytes <= 1.02 * params["a"].nbytes
