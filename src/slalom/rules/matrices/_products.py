"""Products with the adjoints of matrices."""

import jax.numpy as jnp
from jaxtyping import Array, Inexact


def adjoint(x: Inexact[Array, "... n m"]) -> Inexact[Array, "... m n"]:
    """xᴴ."""
    return jnp.conj(x.mT) if jnp.iscomplexobj(x) else x.mT


def adjoint_times(q: Inexact[Array, "... n n"], x: Inexact[Array, "... n m"]) -> Array:
    """qᴴ·x, without a transposed copy of `q`, which XLA:CPU would make."""
    return adjoint(adjoint(x) @ q)


def times_adjoint(x: Inexact[Array, "... n m"], q: Inexact[Array, "... k m"]) -> Array:
    """x·qᴴ, without a transposed copy of `q`."""
    return jnp.einsum("...ij,...kj->...ik", x, jnp.conj(q) if jnp.iscomplexobj(q) else q)
