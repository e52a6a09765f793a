"""What is special about DoG: its step is the way gone, over the gradients seen."""

import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

DESCENT = sl.ScaleByDistanceOverGradients(0.5) | sl.Scale(-1.0)


def test_the_first_step_is_as_long_as_the_start_says():
    params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array(0.0)}
    grads = {"w": jnp.array([0.6, 0.8]), "b": jnp.array(-7.0)}
    stepped, opt = sl.Optimizer(DESCENT, params).step(params, grads)
    np.testing.assert_allclose(stepped["w"], jnp.array([3.0, 4.0]) - 3 * grads["w"], rtol=1e-6)
    np.testing.assert_allclose(stepped["b"], 0.5, rtol=1e-6)
    # The second: 3 has been gone by w, and two gradients of norm 1 were seen.
    again, opt = opt.step(stepped, grads)
    np.testing.assert_allclose(stepped["w"] - again["w"], 3 / 2**0.5 * grads["w"], rtol=1e-6)
    np.testing.assert_allclose(opt.state[0].max_dist["w"], 3.0, rtol=1e-6)


def test_it_arrives_at_the_minimum_of_a_parabola_without_a_learning_rate():
    minimum = jnp.array([1.0, -1.0, 1.0])

    @jax.jit
    def run(params, opt):
        def body(carry, _):
            params, opt = carry
            return opt.step(params, 2 * (params - minimum)), None

        return jax.lax.scan(body, (params, opt), length=2_000)[0]

    start = jnp.array([-1.0, 10.0, 1.0])
    tx = sl.ScaleByDistanceOverGradients() | sl.Scale(-1.0)
    params, _ = run(start, sl.Optimizer(tx, start))
    np.testing.assert_allclose(params, minimum, atol=3e-2)


def test_the_start_is_kept_as_it_is_and_counted_in_single_precision():
    params = {"w": jnp.array([1.0, 257.0], jnp.bfloat16)}
    state = DESCENT.init(params)[0]
    assert state.init_params["w"].dtype == jnp.bfloat16
    assert state.max_dist["w"].dtype == state.grad_sum_of_squares["w"].dtype == jnp.float32
    wide = sl.ScaleByDistanceOverGradients(param_dtype="float32").init(params)
    assert wide.init_params["w"].dtype == jnp.float32


def test_a_negative_scale_descends_by_itself():
    params = {"w": jnp.ones(2)}
    assert sl.ScaleByDistanceOverGradients(global_scale=-1.0).signs(params) == (-1,)
    assert sl.ScaleByDistanceOverGradients().signs(params) == (1,)


def test_complex_distances_are_those_of_absolute_values():
    params = {"w": jnp.array([3.0 + 4.0j], jnp.complex64)}
    tx = sl.ScaleByDistanceOverGradients(0.5)
    made, _ = tx.update({"w": jnp.array([2j], jnp.complex64)}, tx.init(params), params)
    np.testing.assert_allclose(made["w"], [3j], rtol=1e-6)
