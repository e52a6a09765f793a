"""The checks of types that tests run with. `conftest.py` makes those of inner functions once."""

import beartype
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float

import slalom as sl


def make(factor):
    """A function inside of a function, with its checks as Slalom's inner functions have them."""

    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def scaled(x: Float[Array, " n"], y: Float[Array, " n"]) -> Float[Array, " n"]:
        return (x + y)[:2] * factor

    return scaled


def test_functions_are_checked_inner_ones_whenever_they_are_defined():
    two, three = jnp.ones(2), jnp.ones(3)
    for factor in (2.0, 3.0):  # the second is given the checks of the first
        scaled = make(factor)
        assert float(scaled(two, two)[0]) == 2 * factor
        with pytest.raises(jaxtyping.TypeCheckError, match="checking the parameters"):
            scaled(two, three)
        with pytest.raises(jaxtyping.TypeCheckError, match="checking the return value"):
            scaled(three, three)

    schedule = sl.schedules.linear(1.0, 0.0, transition_steps=10)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"basic\.linear\.__call__"):
        schedule(jnp.arange(3))


@pytest.mark.slow
def test_slow_tests_check_nothing_unless_they_say_so():
    assert make(2.0)(jnp.ones(2), jnp.ones(2)).shape == (2,)
    assert make(2.0)(jnp.ones(3), jnp.ones(3)).shape == (2,)
