"""Counts the scratch memory of steps whose state is stored in `"int8"`.

    python -m benchmarks.stored_scratch --docs docs/guides/memory.md

The steps are compiled for the shapes of GPT-2 small, and not run. It takes a few minutes.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

import slalom as sl

from .docs import _table, replace_between
from .shapes import gpt2

BEGIN = "<!-- scratch: python -m benchmarks.stored_scratch --docs docs/guides/memory.md -->"

END = "<!-- end of scratch -->"


def cases() -> dict[str, sl.AbstractTransform]:
    """The optimizers, as code that the table shows."""
    clip, adamw = sl.ClipByGlobalNorm(1.0), sl.adamw(1e-3)
    return {
        'adamw.store("int8")': adamw.store("int8"),
        'chain(clip, adamw).store("int8")': (clip | adamw).store("int8"),
        'chain(clip, adamw).store("int8").every_k(4)': (clip | adamw).store("int8").every_k(4),
        'chain(clip, adamw).every_k(4).store("int8")': (clip | adamw).every_k(4).store("int8"),
        'lion.store("int8")': sl.lion(1e-4).store("int8"),
        'lamb.store("int8")': sl.lamb(1e-3).store("int8"),
    }


def scratch_per_parameter(tx: sl.AbstractTransform, params: dict[str, Any]) -> float:
    """The bytes of scratch memory of a compiled step for each parameter."""
    opt = sl.Optimizer(tx, params)
    step = jax.jit(lambda params, opt, grads: opt.step(params, grads), donate_argnums=(0, 1))
    memory = step.lower(params, opt, params).compile().memory_analysis()
    return memory.temp_size_in_bytes / sum(x.size for x in params.values())


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stored_scratch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fraction", type=int, default=1, help="narrow matrices by this")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(argv)
    params = jax.eval_shape(lambda: gpt2(args.fraction))
    found = {}
    for name, tx in cases().items():
        found[name] = scratch_per_parameter(tx, params)
        print(f"{name:44s} {found[name]:.2f} bytes per parameter", flush=True)
    if args.docs:
        rows = [[f"`{name}`", f"{x:.2f}"] for name, x in found.items()]
        heads = ["", "scratch, bytes per parameter"]
        replace_between(args.docs, BEGIN, END, lambda: _table(heads, rows))
    return found


if __name__ == "__main__":
    main()
