"""What donation costs: the three choices of `sl.train_step(donate=)`, interleaved in one process.

    python -m benchmarks.donation --docs docs/performance.md

In the first rows the gradient is an argument of the loss, so that only the optimizer's step is
measured: the case in which the choice matters most. In the last one a model is trained.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

from .docs import replace_between
from .measure import interleave
from .shapes import gpt2, mlp

BEGIN = "<!-- donation: python -m benchmarks.donation --docs docs/performance.md -->"
END = "<!-- end of donation -->"
CHOICES: tuple[Any, ...] = ("all", "opt", False)
WINDOW = 4
UPDATES = {
    "AdamW": sl.adamw(1e-3),
    "AdamW every 4, idle step": sl.adamw(1e-3).every_k(WINDOW),
}
TRAINING = "AdamW, training an MLP with 256 examples"


@jax.custom_vjp
def given_gradient(params: Any, grads: Any) -> Any:
    """A loss of 0 whose gradient is `grads`."""
    del params, grads
    return jnp.zeros(())


given_gradient.defvjp(
    lambda params, grads: (jnp.zeros(()), grads),
    lambda grads, cotangent: (grads, jax.tree.map(jnp.zeros_like, grads)),
)


def mean_square(model: Any, x: Any) -> Any:
    """The loss of a model that is trained."""
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


class Loop:
    """A training loop, and the memory of its program."""

    def __init__(self, loss_fn: Any, tx: sl.AbstractTransform, model: Any, batch: Any, donate: Any):
        self.step = sl.train_step(loss_fn, donate=donate)
        self.model = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
        self.opt = sl.Optimizer(tx, self.model)
        self.batch = batch
        memory = self.step.lower(self.model, self.opt, batch).compile().memory_analysis()
        self.peak_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )

    def __call__(self) -> None:
        self.model, self.opt, loss = self.step(self.model, self.opt, self.batch)
        jax.block_until_ready((self.opt, loss))


def measure(params: Any, width: int, repetitions: int) -> list[dict[str, Any]]:
    """For each row, the time and the peak memory of each choice.

    **Arguments:**

    - `params`: the parameters to update with given gradients.
    - `width`: the width of the model that is trained.
    - `repetitions`: how often each step is timed.
    """
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
    cases = {name: (given_gradient, tx, params, grads) for name, tx in UPDATES.items()}
    model, x = mlp(10, width), jnp.ones((256, width))
    cases[TRAINING] = (mean_square, sl.adamw(1e-3), model, x)
    rows = []
    for name, case in cases.items():
        numbers = sum(p.size for p in jax.tree.leaves(case[2]) if eqx.is_array(p))
        loops = {str(choice): Loop(*case, choice) for choice in CHOICES}
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
        f"The gradients are given, for {rows[0]['parameters'] / 1e6:.3g} M parameters in the "
        f"leaves of GPT-2 small, except in the last rows ({jax.default_backend()} backend).",
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
    rows = measure(gpt2(args.fraction), 512, args.repetitions)
    print(markdown(rows))
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(rows))
    return rows


if __name__ == "__main__":
    main()
