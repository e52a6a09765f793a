"""Many small leaves: the CPU time to trace and to compile a clipped AdamW step.

    python -m benchmarks.many_leaves --docs docs/performance.md

It is measured as CPU time, which other programs on the machine change little.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import slalom as sl

from .docs import replace_between

BEGIN = "<!-- many leaves: python -m benchmarks.many_leaves --docs docs/performance.md -->"
END = "<!-- end of many leaves -->"
CLIPPED = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)
THEIRS = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
TITLES = {
    "(sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)).flatten()": CLIPPED.flatten(),
    "sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3).flatten()": (
        sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3).flatten()
    ),
    "sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)": CLIPPED,
    "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))": THEIRS,
}
FLAT = next(iter(TITLES))
ADD = "jax.tree.map(jnp.add, params, updates)"
"""A step without an optimizer, to show how the compiler itself scales."""
CASES = [
    *((title, 2_000) for title in TITLES),
    *((title, number) for title in (FLAT, ADD) for number in (500, 2_000, 10_000)),
]


def measure(title: str, number: int) -> float:
    """The CPU seconds to trace and compile a step of this many leaves of 64 numbers."""
    params = {f"w{i:05}": jax.ShapeDtypeStruct((64,), jnp.float32) for i in range(number)}
    tx = TITLES.get(title)
    if tx is None:
        state = ()

        def step(params: Any, state: Any, updates: Any) -> Any:
            return jax.tree.map(jnp.add, params, updates), state
    elif isinstance(tx, sl.AbstractTransform):
        state = sl.Optimizer(tx, params)

        def step(params: Any, opt: Any, grads: Any) -> Any:
            return opt.step(params, grads)
    else:
        state = jax.eval_shape(tx.init, params)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    start = time.process_time()
    jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    return time.process_time() - start


def markdown(rows: Sequence[tuple[str, int, float]]) -> str:
    """The times as a table."""
    lines = ["| CPU time to trace and compile a step | leaves | seconds |", "| --- | ---: | ---: |"]
    for title, number, seconds in rows:
        name = title.replace("|", "\\|")
        lines.append(f"| `{name}` | {number} | {seconds:.1f} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> list[tuple[str, int, float]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_leaves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(given)
    rows = []
    for title, number in dict.fromkeys(CASES):
        rows.append((title, number, measure(title, number)))
        print(*rows[-1], flush=True)
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(rows))
    return rows


if __name__ == "__main__":
    main()
