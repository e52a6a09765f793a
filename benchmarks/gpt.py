"""A transformer in the form of GPT-2, in Equinox and in PyTorch, to measure training steps with."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


class Size(NamedTuple):
    """The size of a model and of its batches."""

    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    length: int = 1024
    batch: int = 8


SMALL = Size()
"""GPT-2 small: 124 M parameters."""
TINY = Size(vocabulary=32, width=16, depth=2, heads=2, length=8, batch=2)


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, size: Size, key: Array):
        keys, width = jax.random.split(key, 4), size.width
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads = size.heads

    def __call__(self, x: Array) -> Array:
        length, width = x.shape
        h = jax.vmap(self.qkv)(_normalized(self.norms[0], x))
        q, k, v = jnp.moveaxis(h.reshape(length, 3, self.heads, width // self.heads), 1, 0)
        # On a GPU, cuDNN's kernel for half precision, which does not store the scores.
        fused = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn" if fused else "xla"
        )
        x = x + jax.vmap(self.out)(mixed.reshape(length, width))
        h = jax.vmap(self.up)(_normalized(self.norms[1], x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class GPT(eqx.Module):
    """Logits of the next token, with the embedding as the last layer."""

    tokens: eqx.nn.Embedding
    positions: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, size: Size, key: Array):
        first, second, *rest = jax.random.split(key, 2 + size.depth)
        weight = 0.02 * jax.random.normal(first, (size.vocabulary, size.width))
        self.tokens = eqx.nn.Embedding(weight=weight)
        self.positions = 0.02 * jax.random.normal(second, (size.length, size.width))
        self.blocks = [Block(size, key) for key in rest]
        self.norm = eqx.nn.LayerNorm(size.width)

    def __call__(self, tokens: Array) -> Array:
        x = jax.vmap(self.tokens)(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return _normalized(self.norm, x) @ self.tokens.weight.T


def _normalized(norm: eqx.nn.LayerNorm, x: Array) -> Array:
    return jax.vmap(norm)(x).astype(x.dtype)


def loss_fn(model: GPT, tokens: Array) -> Array:
    """The mean cross-entropy of the next tokens."""
    logits = jax.vmap(model)(tokens[:, :-1]).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def batch(size: Size) -> Array:
    """Random tokens."""
    shape = (size.batch, size.length + 1)
    return jax.random.randint(jax.random.key(1), shape, 0, size.vocabulary)


def torch_model(size: Size) -> Any:
    """The same model in PyTorch, which returns the loss of a batch of tokens."""
    import torch
    from torch import nn
    from torch.nn import functional

    class TorchBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size.width
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            examples, length, width = x.shape
            h = self.qkv(self.norms[0](x))
            h = h.view(examples, length, 3, size.heads, width // size.heads)
            q, k, v = h.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(examples, length, width))
            h = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(h)

    class TorchGPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(size.vocabulary, size.width)
            self.positions = nn.Parameter(0.02 * torch.randn(size.length, size.width))
            self.blocks = nn.ModuleList([TorchBlock() for _ in range(size.depth)])
            self.norm = nn.LayerNorm(size.width)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens[:, :-1]) + self.positions
            for block in self.blocks:
                x = block(x)
            logits = self.norm(x) @ self.tokens.weight.T
            return functional.cross_entropy(
                logits.float().view(-1, size.vocabulary), tokens[:, 1:].reshape(-1)
            )

    return TorchGPT()
