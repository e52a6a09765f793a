"""Measures the memory and the losses of the policies that write half-precision parameters.

    python -m benchmarks.writing --docs docs/guides/memory.md

The bytes are those of a compiled step of AdamW on the shapes of GPT-2 small. The losses are
those of a small transformer on Python's documentation, which is trained from the same start on the
same batches with each policy, and once in float32. `--times` measures how long a step takes
instead, relative to float32.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

from .docs import _table, replace_between
from .measure import interleave, ratio, step_of
from .shapes import gpt2

BEGIN = "<!-- figures: python -m benchmarks.writing --docs docs/guides/memory.md -->"
END = "<!-- end of policies -->"
POLICIES = ("nearest", "stochastic", "ecc", "kahan", "master")
KEPT = {"nearest": 0, "stochastic": 0, "ecc": 1, "kahan": 2, "master": 4}
"""The bytes per parameter that each policy keeps."""

# --- bytes ------------------------------------------------------------------------------------


def bytes_per_parameter(policy: str | None) -> tuple[float, float, float]:
    """The bytes of parameters and state per parameter, promised and measured, and of scratch.

    Of AdamW with bfloat16 parameters and this policy, or with float32 parameters if there is none.
    """
    dtype = jnp.dtype(jnp.float32 if policy is None else jnp.bfloat16)
    shapes = jax.eval_shape(gpt2)
    params = {name: jax.ShapeDtypeStruct(x.shape, dtype) for name, x in shapes.items()}
    tx = sl.adamw(1e-3)
    opt = sl.Optimizer(tx if policy is None else tx.write(policy), params)
    step = jax.jit(lambda params, opt, grads: opt.step(params, grads), donate_argnums=(0, 1))
    memory = step.lower(params, opt, params).compile().memory_analysis()
    number = sum(x.size for x in params.values())
    # Parameters and first moments, second moments, and what the policy keeps.
    promised = 2 * dtype.itemsize + 4 + KEPT.get(policy or "", 0)
    measured = memory.argument_size_in_bytes / number - dtype.itemsize
    return promised, measured, memory.temp_size_in_bytes / number


def relative_times(fraction: int = 8, repetitions: int = 12) -> dict[str | None, float]:
    """The time of a step divided by that of AdamW with float32 parameters."""
    calls = {}
    for policy in (None, *POLICIES):
        dtype = jnp.float32 if policy is None else jnp.bfloat16
        params = {name: x.astype(dtype) for name, x in gpt2(fraction).items()}
        grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
        tx = sl.adamw(1e-3)
        calls[policy] = step_of(tx if policy is None else tx.write(policy), params, grads)
    times = interleave(calls, repetitions)
    return {policy: ratio(own, times[None])["median"] for policy, own in times.items()}


# --- losses -----------------------------------------------------------------------------------

CONTEXT, WIDTH, BATCH = 32, 32, 16


class Transformer(eqx.Module):
    """A block of attention and an MLP, between embeddings and a linear layer."""

    embedding: eqx.nn.Embedding
    position: eqx.nn.Embedding
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, key: Any):
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(vocabulary, WIDTH, key=keys[0])
        self.position = eqx.nn.Embedding(CONTEXT, WIDTH, key=keys[1])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(3)]
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[2])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=keys[3])
        self.head = eqx.nn.Linear(WIDTH, vocabulary, key=keys[4])

    def __call__(self, tokens: Any) -> Any:
        causal = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
        x = self.embedding.weight[tokens] + self.position.weight
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=causal)
        x = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return jax.vmap(self.head)(jax.vmap(self.norms[2])(x))


def loss_fn(model: Transformer, windows: Any) -> Any:
    """Mean cross-entropy per character, in nats."""
    logits = jax.vmap(model)(windows[:, :-1]).astype(jnp.float32)
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, windows[:, 1:, None], axis=2))


def load_data() -> tuple[np.ndarray, int]:
    """The text as integers, and how many characters there are."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    characters, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    return tokens.astype(np.int32), len(characters)


def train(policy: str | None, steps: int, seed: int = 0, learning_rate: float = 2e-4) -> Any:
    """The mean loss of the last tenth of the steps, and the share of updates that rounding lost."""
    tokens, vocabulary = load_data()
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(tokens) - CONTEXT, size=(steps, BATCH))
    windows = tokens[starts[..., None] + np.arange(CONTEXT + 1)]
    model = Transformer(vocabulary, jax.random.key(seed))
    if policy is not None:
        model = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model
        )
    tx = sl.adamw(learning_rate, b2=0.98, weight_decay=0.1, decay_where=sl.where.ndim(min=2))
    tx = (tx if policy is None else tx.write(policy)).record()
    step = sl.train_step(loss_fn)
    arrays, static = eqx.partition(model, eqx.is_array)

    def body(carry: Any, batch: Any) -> Any:
        arrays, opt = carry
        model, opt, loss = step(eqx.combine(arrays, static), opt, batch)
        return (eqx.filter(model, eqx.is_array), opt), loss

    start = (arrays, sl.Optimizer(tx, model))
    (_, opt), losses = jax.jit(lambda c, w: jax.lax.scan(body, c, w))(start, windows)
    return float(jnp.mean(losses[-steps // 10 :])), float(opt.metrics["lost_updates"])


# --- tables -----------------------------------------------------------------------------------


def markdown(steps: int) -> str:
    """Both tables."""
    rows = []
    for policy in (None, *POLICIES):
        numbers = bytes_per_parameter(policy)
        rows.append([_name(policy), *(f"{x:.2f}" for x in numbers)])
        print(rows[-1], flush=True)
    heads = ["AdamW", "parameters and state, promised", "in the compiled step", "scratch"]
    text = _table(heads, rows)
    rows, reference = [], 0.0
    for policy in (None, *POLICIES):
        loss, lost = train(policy, steps)
        reference = loss if policy is None else reference
        rows.append([_name(policy), f"{loss:.4f}", f"{loss / reference - 1:+.2%}", f"{lost:.1%}"])
        print(rows[-1], flush=True)
    heads = ["", f"loss after {steps} steps", "relative to float32", "`lost_updates`"]
    return f"{text}\n{_table(heads, rows)}"


def _name(policy: str | None) -> str:
    return "float32" if policy is None else f'bfloat16, `"{policy}"`'


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.writing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1000, help="the number of steps (1000)")
    parser.add_argument("--docs", type=Path, help="write the tables into this page")
    parser.add_argument("--times", action="store_true", help="measure times of a step instead")
    args = parser.parse_args()
    if args.times:
        for policy, time in relative_times().items():
            print(f"{_name(policy)}: {time:.2f}")
        return
    text = markdown(args.steps)
    if args.docs is not None:
        replace_between(args.docs, BEGIN, END, lambda: text)


if __name__ == "__main__":
    main()
