"""Accuracy: what rules and schedules compute in float32, against references of more digits."""

import decimal
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from slalom.transforms.adam_variants import _degrees_of_freedom

AGES = (1, 2, 3, 10, 1_000, 10**6, 10**8, 2**31 - 2)


def exact(x):
    """The number that is stored, without rounding."""
    return Decimal(float(x))


def relative_error(x, reference):
    return float(abs(exact(x) - reference) / abs(reference))


@pytest.mark.parametrize("b2", [0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("age", AGES)
def test_radam_counts_degrees_of_freedom_at_any_age(b2, age):
    b2 = jnp.float32(b2)
    rho, _ = _degrees_of_freedom(b2, jnp.asarray(age, jnp.int32))
    with decimal.localcontext(prec=60):
        d, t = exact(b2), Decimal(int(np.float32(age)))
        reference = 2 / (1 - d) - 1 - 2 * t * d**t / (1 - d**t)
    assert relative_error(rho, reference) < 1e-6


@pytest.mark.parametrize("age", [1, 2, 10, 1_000, 2**31 - 2])
def test_radam_has_a_finite_derivative_at_any_age(age):
    def degrees(b2):
        return _degrees_of_freedom(b2, jnp.asarray(age, jnp.int32))[0]

    assert jnp.isfinite(jax.grad(degrees)(jnp.float32(0.9)))
