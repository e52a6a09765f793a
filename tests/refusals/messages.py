"""How a bad input is refused: what its message must say, and what bad inputs are made of."""

import contextlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl

ESSENTIALS = {
    "names": "'[^']*'",
    "code": "`[^`]*`",
    "the value given": "(?s:, got .*)",
    "the last sentence": r"(?s:(?<=[.?]) (?=[A-Z])(?!.*[.?] [A-Z]).*)",
}
"""Parts of messages. A row must not match a message that has lost one of them."""


@contextlib.contextmanager
def refused(error: type[Exception], culprit: str, remedy: str = "", *, obvious: str = ""):
    """Expects an error, with what its message must say.

    The `culprit` is what is wrong and where: the transform, the leaf or argument, the value given.
    The `remedy` is what to write instead, or what would be right. In both, `…` stands for any text:
    the prose around what matters is free. Where naming the culprit is enough, the row says in
    `obvious` what the reader will do.
    """
    assert culprit
    assert bool(remedy) != bool(obvious), "a row names the culprit and says what to do"
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    # `str` of a KeyError is the repr of its message.
    message = caught.value.args[0] if error is KeyError else str(caught.value)
    parts = culprit, remedy
    assert says(message, parts), f"{parts} are not in: {message}"
    for what, where in ESSENTIALS.items():
        less = re.sub(where, "", message)
        assert less == message or not says(less, parts), f"the row lacks {what} of: {message}"


def says(message: str, parts: tuple[str, ...]) -> bool:
    patterns = ("(?s:.*?)".join(map(re.escape, re.split(" *… *", part))) for part in parts)
    return all(re.search(pattern, message) for pattern in patterns)


def params() -> Any:
    return {"b": jnp.ones(2), "w": jnp.ones((3, 2))}


def bound(tx: Any = None, **options: Any) -> sl.Optimizer:
    return sl.Optimizer(sl.adam(0.1) if tx is None else tx, params(), **options)


def mlp(depth: int = 1, width: int = 4) -> eqx.nn.MLP:
    # Without random numbers, which are compiled for each shape.
    shapes = eqx.filter_eval_shape(eqx.nn.MLP, 2, 1, width, depth, key=jax.random.key(0))
    dynamic, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree.map(lambda x: jnp.ones(x.shape), dynamic), static)


def total(model: Any) -> jax.Array:
    return jnp.sum(model["b"]) + jnp.sum(model["w"])


def arrays(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


class ScaleByValue(sl.AbstractStatelessTransform):
    needs = ("value",)

    def apply(self, updates, params, context):
        value = self.demand("value", context and context.value)
        return jax.tree.map(lambda u: u * value, updates)


class Count(eqx.Module):
    n: Any


class Forgetful(sl.AbstractTransform):
    """Returns whatever state or updates it is told to."""

    state: Any = eqx.field(static=True, default=None)
    result: Any = eqx.field(static=True, default=None)

    def init(self, params):
        return Count(jnp.zeros((), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        made = updates if self.result is None else self.result(updates)
        return made, state if self.state is None else self.state(state)
