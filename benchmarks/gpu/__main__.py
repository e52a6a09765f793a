"""Slalom on one GPU: bandwidth, matrix rules, training steps and memory.

    python -m benchmarks.gpu --json gpu.json --docs docs/performance.md

It takes about ten minutes on an H100. `--only` measures some parts, and adds them to the file. The
first training step of a process pays for what later ones find done, so measure the training steps
in processes of their own. `--dry` runs all of it on a tiny model, on any backend. Steps are
dispatched one after the other and awaited together, since a step of 1 ms would otherwise be
measured with the time that the host takes to start it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .. import gpt
from ..docs import replace_between
from ..shapes import TINY, gpt2
from . import matrices, small, training, updates

BEGIN = "<!-- gpu: python -m benchmarks.gpu --docs docs/performance.md -->"
END = "<!-- end of gpu -->"


def markdown(found: dict[str, Any]) -> str:
    """The figures as tables."""
    head = (
        f"Measured on one {found['device']} with JAX {found['jax']}, on the leaves of "
        f"{found['model']}."
    )
    parts = [text for part in (updates, matrices, training, small) for text in part.text(found)]
    return "\n\n".join([head, *parts])


def run(args: argparse.Namespace) -> dict[str, Any]:
    make = TINY["tiny"].make if args.dry else gpt2
    size = gpt.TINY if args.dry else gpt.SMALL
    repetitions, entries = (2, 2**10) if args.dry else (20, 2**28)
    found: dict[str, Any] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
    found |= {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": "a tiny model" if args.dry else "GPT-2 small (124 M parameters)",
    }
    few = max(2, repetitions // 2)
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "memory": lambda: updates.memory(make),  # first: it reads the peak of the process
        "bandwidth": lambda: updates.bandwidth(make(), repetitions, entries),
        "peers": lambda: updates.peers(make(), repetitions),
        "matrices": lambda: matrices.muon(make(), few),
        "factorizations": matrices.factorizations,
        "soap": lambda: matrices.soap(make(), few),
        "fits": lambda: small.fits(3 if args.dry else 100),
        "loops": lambda: small.loops(10 * repetitions),
    }
    for name in training.CONTENDERS:
        if args.dry and name == "torch-compiled":
            continue  # its compiler takes minutes, whatever the size
        parts[f"training-{name}"] = lambda name=name: training.measured(name, size, few)
    for name in args.only or parts:
        found[name] = parts[name]()
        if args.json:  # after each part, since a lent device may be taken back
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures, and prints what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry", action="store_true", help="a tiny model, on any backend")
    parser.add_argument("--only", nargs="+", help="parts to measure, such as bandwidth")
    parser.add_argument("--load", type=Path, help="load results instead of measuring")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--docs", type=Path, help="write the tables into this page")
    args = parser.parse_args(argv)
    found = json.loads(args.load.read_text()) if args.load else run(args)
    print(markdown(found))
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(found))
    return found


if __name__ == "__main__":
    main()
