"""Projections of each matrix: onto orthonormal columns, and onto positive semidefinite ones."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import slalom as sl
from helpers import slow_except

stiefel, psd = sl.projections.stiefel(), sl.projections.psd()


def random(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((*shape, 2))
    return jnp.asarray((x @ np.array([1, 1j]) if dtype == np.complex64 else x[..., 0]), dtype)


DTYPES = slow_except([np.float32, np.complex64], np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_orthonormal_columns_are_the_polar_factor(dtype):
    x = {"tall": random(5, 3, dtype=dtype), "stack": random(2, 3, 4, dtype=dtype)}
    p = stiefel(x)
    np.testing.assert_allclose(p["tall"], scipy.linalg.polar(x["tall"])[0], atol=2e-6)
    for one, own in zip(x["stack"], p["stack"], strict=True):
        np.testing.assert_allclose(own, scipy.linalg.polar(one, side="left")[0], atol=2e-6)
        np.testing.assert_allclose(own @ own.conj().T, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_semidefinite_matrices_have_no_negative_eigenvalues(dtype):
    x = random(2, 4, 4, dtype=dtype)
    p = np.asarray(psd(x))
    for one, own in zip(np.asarray(x), p, strict=True):
        values, vectors = np.linalg.eigh((one + one.conj().T) / 2)
        expected = (vectors * np.maximum(values, 0)) @ vectors.conj().T
        np.testing.assert_allclose(own, expected, atol=3e-6)
        np.testing.assert_allclose(psd(jnp.asarray(own)), own, atol=3e-6)


def test_a_half_precision_matrix_is_projected_in_float32():
    x = random(6, 2)
    p = stiefel(x.astype(jnp.bfloat16))
    assert p.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(p, np.float32), stiefel(x), atol=0.02)
