"""How fast steps are whose state is stored in fewer bits, or whose parameters are in bfloat16.

    python -m benchmarks.precision --docs docs/performance.md

All steps are compared with those of the same rule in float32, in one process, on the leaves of one
block of GPT-2 small. It takes about two minutes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import slalom as sl

from .codecs import CODECS
from .docs import _table, replace_between
from .measure import Step, interleave, ratio, step_of
from .report import machine
from .writing import POLICIES

BEGIN = "<!-- precision: python -m benchmarks.precision --docs docs/performance.md -->"
END = "<!-- end of precision -->"
TARGETS = {'"bfloat16"': 1.0, '"int8"': 0.5, '"master"': 1.0, '"stochastic"': 1.0}
"""The targets for the speed of AdamW on a CPU."""


class Case(NamedTuple):
    """A step to measure."""

    rule: str
    state: str
    """How its state or its parameters are stored."""
    dtype: Any
    """The dtype of the parameters and gradients."""
    make: Callable[[], Any]
    """The transform, of Slalom or Optax."""


def cases() -> list[Case]:
    """All steps. The first one of each rule is the one in float32."""
    rules: dict[str, tuple[Any, Any]] = {
        "AdamW": (lambda: sl.adamw(1e-3), lambda **kw: optax.adamw(1e-3, **kw)),
        "Lion": (lambda: sl.lion(1e-4), lambda **kw: optax.lion(1e-4, **kw)),
    }
    half = 'Optax, `mu_dtype="bfloat16"`'
    found = []
    for rule, (ours, theirs) in rules.items():
        found.append(Case(rule, "float32", jnp.float32, ours))
        found += [
            Case(rule, f'`.store("{c}")`', jnp.float32, lambda c=c, ours=ours: ours().store(c))
            for c in CODECS
        ]
        make = lambda theirs=theirs: theirs(mu_dtype="bfloat16")  # noqa: E731
        found.append(Case(rule, half, jnp.float32, make))
        if rule == "AdamW":
            found += [
                Case(rule, f'`.write("{p}")`', jnp.bfloat16, lambda p=p: sl.adamw(1e-3).write(p))
                for p in POLICIES
            ]
            found.append(Case(rule, half, jnp.bfloat16, make))
    return found


def block(width: int = 768) -> dict[str, jax.Array]:
    """The 16 leaves of a block of a transformer: 7.1 M parameters."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    leaves = {f"{name}.weight": shape for name, shape in shapes.items()}
    leaves |= {f"{name}.bias": shape[1:] for name, shape in shapes.items()}
    leaves |= {f"norm{i}.{name}": (width,) for i in (1, 2) for name in ("weight", "bias")}
    return {name: jnp.full(shape, 0.02, jnp.float32) for name, shape in leaves.items()}


def step(case: Case, params: dict[str, jax.Array]) -> Step:
    """The compiled step of a case."""
    params = {name: p.astype(case.dtype) for name, p in params.items()}
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
    return step_of(case.make(), params, grads)


def measure(params: dict[str, jax.Array], repetitions: int) -> list[dict[str, Any]]:
    """The speed, the bytes and the scratch memory of each step.

    **Arguments:**

    - `params`: the parameters, in float32.
    - `repetitions`: how often each step is timed.
    """
    number = sum(p.size for p in params.values())
    rows = []
    for rule in ("AdamW", "Lion"):
        chosen = [case for case in cases() if case.rule == rule]
        steps = {str(i): step(case, params) for i, case in enumerate(chosen)}
        times = interleave(steps, repetitions)
        for i, case in enumerate(chosen):
            memory = steps[str(i)].program.memory_analysis()
            # What is read once and written once, whatever is kept in caches in between.
            moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
            parameters = number * jnp.dtype(case.dtype).itemsize
            rows.append(
                {
                    "rule": case.rule,
                    "state": case.state,
                    "dtype": jnp.dtype(case.dtype).name,
                    "speed": ratio(times["0"], times[str(i)]),
                    "bytes_per_parameter": moved / number,
                    "scratch": steps[str(i)].cost.scratch_bytes / parameters,
                    "parameters": number,
                }
            )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The figures as a table, with the targets that there are."""
    heads = ["", "parameters", "speed", "target", "bytes moved", "scratch"]
    lines = []
    for row in rows:
        speed = row["speed"]
        wanted = [t for name, t in TARGETS.items() if f"({name})" in row["state"]]
        lines.append(
            [
                f"{row['rule']}, {row['state']}",
                row["dtype"],
                f"**{speed['median']:.2f}** ({speed['low']:.2f}–{speed['high']:.2f})",
                f"{wanted[0]}" if wanted and row["rule"] == "AdamW" else "",
                f"{row['bytes_per_parameter']:.1f}",
                f"{row['scratch']:.1%}",
            ]
        )
    found = machine()
    return (
        f"Measured on {found['cores']} cores of {found['processor']} (backend "
        f"{found['backend']}), with the {rows[0]['parameters'] / 1e6:.2g} M parameters of a block "
        f"of GPT-2 small.\n\n{_table(heads, lines)}"
    )


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=768, help="the width of the block (768)")
    parser.add_argument("--repetitions", type=int, default=24, help="how often to time a step (24)")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(given)
    rows = measure(block(args.width), args.repetitions)
    print(markdown(rows))
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(rows))
    return rows


if __name__ == "__main__":
    main()
