"""The trees of parameters that are stepped over."""

import equinox as eqx
import jax
import jax.numpy as jnp


def gpt2(fraction: int = 1) -> dict[str, jax.Array]:
    """The 148 leaves of GPT-2 small (124 M), or with every matrix `fraction` times narrower."""
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
    return {name: jnp.full(shape, 0.02) for name, shape in leaves.items()}


def many_leaves() -> dict[str, jax.Array]:
    """1000 leaves of 64 × 64: what each leaf costs."""
    return {f"layer{i}": jnp.full((64, 64), 0.02) for i in range(1000)}


def mlp() -> eqx.nn.MLP:
    """A narrow Equinox model of 100 leaves: what a call costs on the host."""
    return eqx.nn.MLP(4, 4, 8, 49, key=jax.random.key(0))
