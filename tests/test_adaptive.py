"""The adaptive family: what is special to each rule, and that every recipe arrives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


PARABOLA = (
    lambda x: jnp.sum(jnp.square(x - jnp.array([1.0, -1.0, 1.0]))),
    jnp.array([-1.0, 10.0, 1.0]),
    jnp.array([1.0, -1.0, 1.0]),
)
ROSENBROCK = (rosenbrock, jnp.zeros(2), jnp.ones(2))

RECIPES = {
    "nadam": sl.nadam(1e-2),
    "nadamw": sl.nadamw(1e-2),
}


@pytest.mark.parametrize("problem", [PARABOLA, ROSENBROCK], ids=["parabola", "rosenbrock"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_arrives_at_the_minimum(name, problem):
    function, start, minimum = problem

    @jax.jit
    def run(params, opt):
        def body(carry, _):
            params, opt = carry
            return opt.step(params, jax.grad(function)(params)), None

        return jax.lax.scan(body, (params, opt), length=10_000)[0]

    params, _ = run(start, sl.Optimizer(RECIPES[name], start))
    np.testing.assert_allclose(params, minimum, atol=3e-2, rtol=3e-2)
