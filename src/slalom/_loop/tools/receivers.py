"""Reports from inside a compiled loop to a Python function.

The program knows the function by a number, which is one of its arguments. So another function does
not compile the program again, and the program keeps none alive.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_numbers = itertools.count()
_receivers: dict[int, Callable[..., None]] = {}


@contextlib.contextmanager
def receiver(function: Callable[..., None]) -> Iterator[Array]:
    """Lets a function receive the values that programs in this context send. Yields its number.

    An exception of the function ends the program, and leaves the context as it was raised.
    """
    errors: list[BaseException] = []

    def receive(*values: Any) -> None:
        if errors:
            return  # the program is about to end
        try:
            function(*values)
        except BaseException as error:
            errors.append(error)
            raise

    number = next(_numbers)
    _receivers[number] = receive
    try:
        try:
            yield jnp.asarray(number, jnp.int32)
            jax.effects_barrier()
        except Exception:
            if not errors:
                raise
        if errors:  # JAX has made another error of it, which shows its text only
            raise errors[0] from None
    finally:
        del _receivers[number]


def send(number: Array, *values: Array) -> None:
    """Calls the function with this number, if its context is still open."""
    jax.debug.callback(_receive, number, *values)


def _receive(number: Any, *values: Any) -> None:
    receive = _receivers.get(int(number))
    if receive is not None:
        receive(*values)
