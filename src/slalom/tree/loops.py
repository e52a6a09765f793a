"""Loops whose number of iterations is known only when they run."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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
