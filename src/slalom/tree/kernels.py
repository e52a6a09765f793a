"""Lets leaves share the kernels that XLA:CPU compiles."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .types import under_jit


def as_arguments(numbers: Sequence[Any], near: Any) -> list[Array]:
    """Numbers that differ between leaves, as arguments of the kernels that use them.

    XLA:CPU compiles one kernel for all leaves whose kernels have the same code, and takes 20 to
    35 ms for each further one. A constant is part of the code. What a conditional returns is not a
    constant, and the barrier keeps XLA from seeing which branch is taken.

    **Arguments:**

    - `numbers`: the numbers: of NumPy, or arrays that are computed before.
    - `near`: any array of the same trace. Outside a `jit` there is nothing to share.
    """
    if not numbers or not under_jit(near):
        return [jnp.asarray(n) for n in numbers]

    def on_cpu() -> list[Array]:
        always = jax.lax.optimization_barrier(jnp.bool_(True))
        return jax.lax.cond(always, elsewhere, lambda: [jnp.zeros_like(n) for n in numbers])

    def elsewhere() -> list[Array]:
        return [jnp.asarray(n) for n in numbers]

    return jax.lax.platform_dependent(cpu=on_cpu, default=elsewhere)


def entries(vectors: Sequence[Array]) -> list[list[Array]]:
    """The entries of vectors of one length, with an entry for each leaf.

    A kernel reads one at a position that is an argument, and does not compute the vector itself.
    """
    if not vectors or not under_jit(vectors[0]):
        return [list(x) for x in vectors]
    # Unsigned, since JAX would count negative ones from the end.
    positions = np.arange(len(vectors[0]), dtype=np.uint32)
    known = as_arguments([*vectors, *positions], vectors[0])
    vectors, at = known[: len(vectors)], known[len(vectors) :]
    return [[_entry(x, i) for i in at] for x in vectors]


@jax.jit
def _entry(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
