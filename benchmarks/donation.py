"""What donation costs: the three choices of `sl.train_step(donate=)`, interleaved in one process.

    python -m benchmarks.donation --docs docs/performance.md

The gradient is an argument of the loss, so that nothing but the optimizer's step is measured: the
case in which the choice matters most.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from .docs import replace_between
from .measure import interleave
from .shapes import gpt2

BEGIN = "<!-- donation: python -m benchmarks.donation --docs docs/performance.md -->"
END = "<!-- end of donation -->"
CHOICES: tuple[Any, ...] = ("all", "opt", False)
WINDOW = 4
ROWS = {
    "AdamW": sl.adamw(1e-3),
    "AdamW every 4, idle step": sl.adamw(1e-3).every_k(WINDOW),
}


@jax.custom_vjp
def given_gradient(params: Any, grads: Any) -> Any:
    """A loss of 0 whose gradient is `grads`."""
    del params, grads
    return jnp.zeros(())


given_gradient.defvjp(
    lambda params, grads: (jnp.zeros(()), grads),
    lambda grads, cotangent: (grads, jax.tree.map(jnp.zeros_like, grads)),
)


class Loop:
    """A training loop, and the memory of its program."""

    def __init__(self, tx: sl.AbstractTransform, params: Any, grads: Any, donate: Any):
        self.step = sl.train_step(given_gradient, donate=donate)
        self.params = jax.tree.map(jnp.copy, params)
        self.opt = sl.Optimizer(tx, self.params)
        self.grads = grads
        memory = self.step.lower(self.params, self.opt, grads).compile().memory_analysis()
        self.peak_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )

    def __call__(self) -> None:
        self.params, self.opt, loss = self.step(self.params, self.opt, self.grads)
        jax.block_until_ready((self.params, self.opt, loss))


def measure(fraction: int, repetitions: int) -> list[dict[str, Any]]:
    """For each row, the time and the peak memory of each choice."""
    params = gpt2(fraction)
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
    numbers = sum(p.size for p in jax.tree.leaves(params))
    rows = []
    for name, tx in ROWS.items():
        loops = {str(choice): Loop(tx, params, grads, choice) for choice in CHOICES}
        times = interleave(loops, repetitions)
        if "idle" in name:
            times = {
                who: [t for i, t in enumerate(each) if (i + 1) % WINDOW]
                for who, each in times.items()
            }
        rows += [
            {
                "row": name,
                "donate": who,
                "ns_per_parameter": 1e9 * statistics.median(times[who]) / numbers,
                "bytes_per_parameter": loop.peak_bytes / numbers,
                "parameters": numbers,
            }
            for who, loop in loops.items()
        ]
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    lines = [
        f"{rows[0]['parameters'] / 1e6:.3g} M parameters in the leaves of GPT-2 small, "
        f"{jax.default_backend()} backend; gradients are given, so that only the update is timed.",
        "",
        "| | `donate` | ns per parameter | peak bytes per parameter |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in rows:
        written = row["donate"] if row["donate"] == "False" else f'"{row["donate"]}"'
        lines.append(
            f"| {row['row']} | `{written}` | {row['ns_per_parameter']:.2f} | "
            f"{row['bytes_per_parameter']:.1f} |"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.donation", description=__doc__)
    parser.add_argument("--fraction", type=int, default=1, help="narrow the matrices by this")
    parser.add_argument("--repetitions", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(given)
    rows = measure(args.fraction, args.repetitions)
    print(markdown(rows))
    if args.docs:
        replace_between(args.docs, BEGIN, END, markdown(rows))
    return rows


if __name__ == "__main__":
    main()
