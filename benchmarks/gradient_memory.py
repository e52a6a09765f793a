"""Which optimizers hold all gradients at once: the scratch memory of compiled training steps.

    python -m benchmarks.gradient_memory --docs docs/guides/training.md

A step of AdamW frees the gradient of a layer before it computes that of the one before. What needs
to know something about all gradients first, such as their norm, cannot.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from .docs import replace_between
from .shapes import mlp

BEGIN = "<!-- gradients: python -m benchmarks.gradient_memory --docs docs/guides/training.md -->"
END = "<!-- end of gradients -->"
EXAMPLES = 16
ADAMW = sl.adamw(1e-3)
CASES: dict[str, tuple[sl.AbstractTransform, dict[str, Any]]] = {
    "sl.adamw(1e-3)": (ADAMW, {}),
    "sl.ClipByBlockRms(1.0) | sl.adamw(1e-3)": (sl.ClipByBlockRms(1.0) | ADAMW, {}),
    "sl.ClipByGlobalNorm(1.0, delayed=True) | sl.adamw(1e-3)": (
        sl.ClipByGlobalNorm(1.0, delayed=True) | ADAMW,
        {},
    ),
    "sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)": (sl.ClipByGlobalNorm(1.0) | ADAMW, {}),
    "sl.adamw(1e-3).average(0.999)": (ADAMW.average(0.999), {}),
    "sl.schedule_free_adamw(1e-3)": (sl.schedule_free_adamw(1e-3), {}),
    "sl.adamw(1e-3).lookahead(5, 0.5)": (ADAMW.lookahead(5, 0.5), {}),
    "sl.adamw(1e-3).every_k(4)": (ADAMW.every_k(4), {}),
    "sl.adamw(1e-3).if_finite()": (ADAMW.if_finite(), {}),
    "sl.adamw(1e-3).skip_spikes()": (ADAMW.skip_spikes(), {}),
    "sl.adamw(1e-3).record()": (ADAMW.record(), {}),
    "sl.muon(1e-3)": (sl.muon(1e-3), {}),
    "sl.adamw(1e-3), microbatches=4": (ADAMW, {"microbatches": 4}),
}


def mean_square(model: Any, x: Any) -> Any:
    """The loss of the model."""
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def measure(layers: int, width: int) -> list[tuple[str, float]]:
    """For each case, the scratch memory of a step over that of the parameters.

    **Arguments:**

    - `layers`, `width`: the number of layers of an MLP, and their width.
    """
    model, x = mlp(2 * layers, width), jnp.ones((EXAMPLES, width))
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array))
    rows = []
    for code, (tx, options) in CASES.items():
        step = sl.train_step(mean_square, donate="all", **options)
        compiled = step.lower(model, sl.Optimizer(tx, model), x).compile()
        rows.append((code, compiled.memory_analysis().temp_size_in_bytes / params))
        print(*rows[-1], flush=True)
    return rows


def markdown(rows: list[tuple[str, float]]) -> str:
    """The figures as a table."""
    lines = ["| | scratch memory / parameters |", "| --- | ---: |"]
    for code, share in rows:
        escaped = code.replace("|", r"\|")
        lines.append(f"| `{escaped}` | {share:.2f} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> list[tuple[str, float]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradient_memory", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(given)
    rows = measure(args.layers, args.width)
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(rows))
    return rows


if __name__ == "__main__":
    main()
