import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def same_noise(monkeypatch):
    """The same noise in every refresh of Kron, for each matrix of a shape."""

    def noise(_, shape, dtype):
        return jnp.asarray(np.random.default_rng(5).standard_normal(shape), dtype)

    monkeypatch.setattr(jax.random, "normal", noise)
