"""The trees of parameters to benchmark with."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from .rows import Row


class Shape(NamedTuple):
    """A tree of parameters, and the rows to measure with it."""

    title: str
    make: Callable[[], Any]
    rows: tuple[str, ...] | None = None
    """The names of the rows. Defaults to all."""
    target: float | None = None
    """A target that replaces those of the rows."""
    limits: Mapping[str, float] = {}
    """The bytes per parameter of rows for which `Row.limit` is not right."""

    def fit(self, name: str, row: Row) -> Row:
        """A row with the targets of this shape."""
        row = row._replace(
            limit=self.limits.get(name, row.limit),
            idle_limit=self.limits.get(f"{name}, idle step", row.idle_limit),
        )
        if self.target is None:
            return row
        return row._replace(target=self.target, idle_target=self.target)


def gpt2(fraction: int = 1) -> dict[str, jax.Array]:
    """The 148 leaves of GPT-2 small (124 M parameters), with matrices narrowed by `fraction`."""
    width, rows = 768, 768 // fraction
    leaves = {"wte": (50257 // fraction, width), "wpe": (1024 // fraction, width)}
    for i in range(12):
        block = {"attention.qkv": (rows, 3 * width), "attention.out": (rows, width)}
        block |= {"mlp.up": (rows, 4 * width), "mlp.down": (4 * rows, width)}
        for name, shape in block.items():
            leaves |= {f"block{i}.{name}.weight": shape, f"block{i}.{name}.bias": shape[1:]}
        for norm in ("norm1", "norm2"):
            leaves |= {f"block{i}.{norm}.weight": (width,), f"block{i}.{norm}.bias": (width,)}
    leaves |= {"norm.weight": (width,), "norm.bias": (width,)}
    return {name: jnp.full(shape, 0.02, jnp.float32) for name, shape in leaves.items()}


def gpt2_half() -> dict[str, jax.Array]:
    """GPT-2 small in bfloat16."""
    return {name: leaf.astype(jnp.bfloat16) for name, leaf in gpt2().items()}


def many_leaves(count: int = 1000) -> dict[str, jax.Array]:
    """Many leaves of 64 × 64, to measure the cost per leaf."""
    return {f"layer{i}": jnp.full((64, 64), 0.02, jnp.float32) for i in range(count)}


def one_leaf(size: int = 100_000_000) -> dict[str, jax.Array]:
    """A single vector, to measure the cost per parameter."""
    return {"vector": jnp.full((size,), 0.02, jnp.float32)}


def mlp(leaves: int, width: int) -> eqx.nn.MLP:
    """A square Equinox MLP with an even number of leaves."""
    return eqx.nn.MLP(width, width, width, leaves // 2 - 1, key=jax.random.key(0))


def mlp_params() -> Any:
    """The parameters of an Equinox MLP with 10 leaves."""
    return eqx.filter(mlp(10, 512), eqx.is_inexact_array)


_NEVER_SLOWER = 0.97
# Two bytes for gradients, parameters and first moments; four for second moments and accumulators.
_HALF = {
    "AdamW": 18,
    "clip, AdamW": 20,
    "AdamW every 4": (3 * 10 + 22) / 4,
    "AdamW every 4, idle step": 10,
    "SGD, momentum": 10,
    "Lion": 10,
}
_FEW = ("AdamW", "clip, AdamW", "SGD, momentum", "Lion")

FULL = {
    "gpt2": Shape("GPT-2 small", gpt2),
    "bf16": Shape(
        "GPT-2 small in bfloat16", gpt2_half, (*_FEW, "AdamW every 4"), _NEVER_SLOWER, _HALF
    ),
    "leaves": Shape(
        "1000 leaves of 64 × 64", many_leaves, (*_FEW, "flatten(AdamW)"), _NEVER_SLOWER
    ),
    "mlp": Shape("an Equinox MLP", mlp_params, _FEW, _NEVER_SLOWER),
    "one": Shape("one leaf", one_leaf, _FEW, _NEVER_SLOWER),
}
QUICK = {
    "gpt2/8": Shape("GPT-2 small, an eighth", lambda: gpt2(8)),
    "leaves": Shape("1000 leaves of 64 × 64", many_leaves, ("AdamW",)),
}
TINY = {"tiny": Shape("tiny", lambda: {"w": jnp.full((64, 64), 0.02), "b": jnp.full(64, 0.02)})}
