"""What lets leaves share the kernels that XLA:CPU compiles."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .types import under_jit


def as_arguments(numbers: Sequence[int], dtype: Any, near: Any) -> list[Array]:
    """Integers that differ between leaves, as arguments of the kernels that use them.

    XLA:CPU compiles one kernel for all leaves whose kernels have the same code, and takes 20 to
    35 ms for each further one. A constant is part of the code. What a conditional returns is not a
    constant, and the barrier keeps XLA from seeing which branch is taken.

    **Arguments:**

    - `numbers`: the integers.
    - `dtype`: their dtype.
    - `near`: any array of the same trace. Outside of a `jit` there is nothing to share.
    """
    known = [np.asarray(n, dtype) for n in numbers]
    if not numbers or not under_jit(near):
        return [jnp.asarray(n) for n in known]

    def on_cpu() -> list[Array]:
        always = jax.lax.optimization_barrier(jnp.bool_(True))
        return jax.lax.cond(always, elsewhere, lambda: [jnp.zeros((), dtype) for _ in known])

    def elsewhere() -> list[Array]:
        return [jnp.asarray(n) for n in known]

    return jax.lax.platform_dependent(cpu=on_cpu, default=elsewhere)
