"""Three small tasks on real data or a real equation: what to train, on what, and how to score it.

A score is a loss on held-out data, or the error of a solution: less is better. They are small
versions of the examples `digits.py`, `transformer.py` and `pinn.py`.
"""

import dataclasses
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    **Arguments:**

    - `title`, `score`: what it is, and what the score is, for tables.
    - `model`: makes the model from a key.
    - `batch`: makes the batch of a step from a key.
    - `loss`: the loss of a model and a batch.
    - `evaluate`: the score of a model.
    - `steps`: the length of a run.
    - `target`: a score that a good run reaches well before its end.
    """

    title: str
    score: str
    model: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    evaluate: Callable[[Any], Any]
    steps: int
    target: float


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean, in nats."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1))


# --- digits -------------------------------------------------------------------------------------


def digits() -> Task:
    """A convolutional network on 8 × 8 pixels. A quarter of the 1797 images is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = jnp.asarray(images[order]), jnp.asarray(labels[order].astype(np.int32))
    held_out = len(images) // 4

    def model(key: Any) -> Any:
        key1, key2, key3 = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1, key=key1),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(8, 16, kernel_size=3, padding=1, key=key2),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(16 * 4 * 4, 10, key=key3),
            ]
        )

    def batch(key: Any) -> Any:
        rows = jax.random.randint(key, (32,), held_out, len(images))
        return images[rows], labels[rows]

    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(model)(batch[0]), batch[1])

    return Task(
        title="Digits: a convolutional network",
        score="held-out loss",
        model=model,
        batch=batch,
        loss=loss,
        evaluate=lambda model: loss(model, (images[:held_out], labels[:held_out])),
        steps=210,
        target=0.15,
    )


# --- text ---------------------------------------------------------------------------------------

CONTEXT = 32  # characters that the model sees
WIDTH = 32


class Block(eqx.Module):
    """Attention and an MLP, each after a norm and around a residual connection."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: Any):
        key1, key2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key1)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x: Any) -> Any:
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=causal)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    """Maps the characters of a context to the logits of the character after each."""

    embedding: eqx.nn.Embedding
    position: eqx.nn.Embedding
    block: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, key: Any):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        small = jax.nn.initializers.normal(0.02)
        self.embedding = eqx.nn.Embedding(weight=small(key1, (vocabulary, WIDTH)))
        self.position = eqx.nn.Embedding(weight=small(key2, (CONTEXT, WIDTH)))
        self.block = Block(key3)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, vocabulary, key=key4)

    def __call__(self, tokens: Any) -> Any:
        x = self.block(self.embedding.weight[tokens] + self.position.weight)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def text() -> Task:
    """A character transformer on the text of `help()`. The last tenth is held out."""
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    joined = joined.encode("ascii", "ignore").decode()
    characters = sorted(set(joined))
    number = {c: i for i, c in enumerate(characters)}
    tokens = jnp.asarray([number[c] for c in joined], jnp.int32)
    train, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

    def windows(tokens: Any, starts: Any) -> Any:
        return tokens[starts[:, None] + jnp.arange(CONTEXT + 1)]

    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(model)(batch[:, :-1]), batch[:, 1:])

    fixed = windows(held_out, jnp.linspace(0, len(held_out) - CONTEXT - 1, 64).astype(jnp.int32))
    return Task(
        title="Text: a character transformer",
        score="held-out loss, nats per character",
        model=lambda key: Transformer(len(characters), key),
        batch=lambda key: windows(train, jax.random.randint(key, (8,), 0, len(train) - CONTEXT)),
        loss=loss,
        evaluate=lambda model: loss(model, fixed),
        steps=210,
        target=2.5,
    )


# --- a differential equation --------------------------------------------------------------------

VISCOSITY = 0.03 / np.pi


def burgers() -> Task:
    """A physics-informed network for Burgers' equation, on new points in each step."""

    class Solution(eqx.Module):
        """u(t, x), with the initial and boundary values built in."""

        mlp: eqx.nn.MLP

        def __call__(self, t: Any, x: Any) -> Any:
            free = self.mlp(jnp.stack([2 * t - 1, x]))
            return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * free

    def residual(u: Any, t: Any, x: Any) -> Any:
        u_x = jax.jacfwd(u, argnums=1)
        u_t, u_xx = jax.jacfwd(u, argnums=0)(t, x), jax.jacfwd(u_x, argnums=1)(t, x)
        return u_t + u(t, x) * u_x(t, x) - VISCOSITY * u_xx

    grid_t, grid_x = np.meshgrid(np.linspace(0.05, 1, 12), np.linspace(-1, 1, 41))
    t, x = jnp.asarray(grid_t.ravel(), jnp.float32), jnp.asarray(grid_x.ravel(), jnp.float32)
    solution = jnp.asarray(exact(grid_t.ravel(), grid_x.ravel()), jnp.float32)

    def batch(key: Any) -> Any:
        points = jax.random.uniform(key, (2, 96))
        return points[0], 2 * points[1] - 1

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(residual, in_axes=(None, 0, 0))(model, *batch) ** 2)

    def evaluate(model: Any) -> Any:
        error = jax.vmap(model)(t, x) - solution
        return jnp.linalg.norm(error) / jnp.linalg.norm(solution)

    return Task(
        title="Burgers' equation: a physics-informed network",
        score="relative error of the solution",
        model=lambda key: Solution(eqx.nn.MLP(2, "scalar", 24, 3, jnp.tanh, key=key)),
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        steps=600,
        target=0.2,
    )


def exact(t: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The solution by Cole and Hopf, for t > 0, as a quotient of two Gaussian integrals."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - np.sqrt(4 * VISCOSITY * t[..., None]) * z
    kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY))
    return -np.sum(np.sin(np.pi * y) * kernel, axis=-1) / np.sum(kernel, axis=-1)


TASKS = {"digits": digits, "text": text, "burgers": burgers}
