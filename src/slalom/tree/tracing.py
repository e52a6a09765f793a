"""Traced programs: their equations, loops of unknown length, kernels that leaves share, and their
order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool

from .types import PyTree, under_jit


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of all programs inside it, such as branches and loops."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


Carry = TypeVar("Carry")


def while_loop(
    who: str, condition: Callable[[Carry], Any], body: Callable[[Carry], Carry], start: Carry
) -> Carry:
    """`jax.lax.while_loop`, with an error that names it for a derivative in reverse mode.

    **Arguments:**

    - `who`: the transform or function that has the loop, for the message.
    - `condition`, `body`, `start`: as for `jax.lax.while_loop`.
    """
    end = jax.lax.while_loop(condition, body, start)
    return jax.tree.map(lambda x: _forward_only.bind(x, who=who), end)


# The identity. JAX differentiates the loop itself, so the error must come from a primitive after
# it, which reverse mode reaches first.
_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x, who: x)
_forward_only.def_abstract_eval(lambda x, who: x)
batching.defvectorized(_forward_only)
mlir.register_lowering(_forward_only, lambda context, x, who: [x])


def _transpose(cotangent: Any, x: Any, who: str) -> Any:
    raise ValueError(
        f"No derivative in reverse mode, such as `jax.grad`, passes through {who}: it has a loop "
        "whose number of iterations is known only when it runs. Differentiate in forward mode, "
        "with `jax.jvp` or `jax.jacfwd`, or leave this part out with `jax.lax.stop_gradient`."
    )


ad.deflinear2(_forward_only, _transpose)


def traced_once(
    function: Callable[..., Any], like: PyTree, static_argnums: int | tuple[int, ...]
) -> Callable[..., Any]:
    """A function of leaves that is traced only once for each shape, inside of a `jit`.

    Tracing costs 2 ms a leaf in Python; a jit traces once per shape, and XLA inlines it (an
    `inline=True` would copy its equations for every leaf). Outside a trace it would compile once
    per call instead, since the function is new in every call.

    **Arguments:**

    - `function`: the function.
    - `like`: a tree with its arguments, which shows whether they are being traced.
    - `static_argnums`: as for `jax.jit`.
    """
    if any(map(under_jit, jax.tree.leaves(like))):
        return jax.jit(function, static_argnums=static_argnums)
    return function


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
    arrays = as_arguments([*vectors, *positions], vectors[0])
    vectors, at = arrays[: len(vectors)], arrays[len(vectors) :]
    return [[_entry(x, i) for i in at] for x in vectors]


@jax.jit
def _entry(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def after(tree: PyTree, results: PyTree) -> PyTree:
    """The tree, which XLA reads only after it has computed the first of the results."""
    # JAX reads no entry of arrays that are sharded over explicit axes of a mesh.
    whole = (r for r in jax.tree.leaves(results) if r.size and not any(jax.typeof(r).sharding.spec))
    first = next(whole, None)
    return tree if first is None else once_known(tree, false_after(first))


def false_after(x: Array) -> Bool[Array, ""]:
    """A false bool, unknown to XLA until this array is computed."""
    # NaN is not greater than anything either.
    return jnp.real(x[(0,) * x.ndim]).astype(jnp.float32) > jnp.inf


def once_known(tree: PyTree, false: Bool[Array, ""]) -> PyTree:
    """The tree, read only after `false`, a result of `false_after`, is computed."""

    def late(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                late(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        return jnp.where(false, jnp.zeros((), x.dtype), x)

    return jax.tree.map(late, tree)
