"""Measures what storing state in each codec does to losses and to memory.

    pip install -e ".[bench]" && python -m benchmarks.codecs --docs docs/guides/memory.md

A small transformer and a small convolutional network are trained with four optimizers, from the
same starts on the same batches with each codec and once in float32. All leaves are stored. The
bytes are those of a compiled step on the matrices of a block of GPT-2 small. A run takes minutes:
with `--json` what is finished is kept, and `--load` goes on from there.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

from . import codec_peers
from .docs import END, _table, replace_between
from .learning.tasks import TASKS, Task, text
from .report import machine

BEGIN = "<!-- figures: python -m benchmarks.codecs --docs docs/guides/memory.md -->"
FLOAT32 = "float32"
CODECS = {
    "bfloat16": 2.0,
    "int8": 1 + 2 / 32,
    "int4": 0.5 + 4 / 128,
    "dynamic8": 1 + 4 / 256,
    "float16": 2 + 2 / 64,
    "float8_e4m3fn": 1 + 2 / 64,
}
"""The bytes per number, with those of the scales."""
STEPS, SEEDS = 2000, 3
SHAPES = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}

Make = Callable[[Any], sl.AbstractTransform]


def _momentum(learning_rate: Any) -> sl.AbstractTransform:
    return sl.sgd(learning_rate, momentum=0.9)


def _adafactor(learning_rate: Any) -> sl.AbstractTransform:
    return sl.adafactor(learning_rate, momentum=0.9)


def _adamw(learning_rate: Any) -> sl.AbstractTransform:
    return sl.adamw(learning_rate, weight_decay=0.01)


def _lion(learning_rate: Any) -> sl.AbstractTransform:
    return sl.lion(learning_rate, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[Make, float, int]] = {
    "AdamW": (_adamw, 3e-3, 2),
    "Lion": (_lion, 1e-3, 1),
    "momentum": (_momentum, 0.1, 1),
    "Adafactor with momentum": (_adafactor, 0.03, 1),
}
"""The optimizer, its learning rate, and how many numbers it stores per parameter."""


def stored(tx: sl.AbstractTransform, codec: str) -> sl.AbstractTransform:
    """The optimizer with its state in a codec, which may be float32."""
    return tx if codec == FLOAT32 else tx.store(codec, min_size=1)


# --- losses -------------------------------------------------------------------------------------


class Runs:
    """The starts and batches of a task, which all optimizers and codecs share."""

    def __init__(self, task: Task, steps: int, seeds: int):
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(jnp.arange(seeds))
        _, self.static = eqx.partition(task.model(keys[0, 0]), eqx.is_array)

        def start(key: Any) -> Any:
            return eqx.filter(task.model(key), eqx.is_array)

        def batches(key: Any) -> Any:
            return jax.lax.map(lambda i: task.batch(jax.random.fold_in(key, i)), jnp.arange(steps))

        self.task = task
        self.schedule = sl.schedules.warmup_cosine_decay(0.0, 1.0, max(1, steps // 10), steps)
        self.starts = jax.jit(jax.vmap(start))(keys[:, 0])
        self.batches = jax.jit(jax.vmap(batches))(keys[:, 1])
        self.scores = jax.jit(jax.vmap(lambda arrays: task.evaluate(self.whole(arrays))))

    def whole(self, arrays: Any) -> Any:
        return eqx.combine(arrays, self.static)

    def losses(self, make: Make, peak: float, codec: str) -> list[float]:
        """The held-out loss of each seed. All steps of all seeds are one program."""
        tx = stored(make(self.schedule * peak), codec)

        def run(arrays: Any, batches: Any) -> Any:
            def step(carry: Any, batch: Any) -> Any:
                model, opt = self.whole(carry[0]), carry[1]
                model, opt = opt.step(model, eqx.filter_grad(self.task.loss)(model, batch))
                return (eqx.filter(model, eqx.is_array), opt), None

            start = (arrays, sl.Optimizer(tx, self.whole(arrays)))
            return jax.lax.scan(step, start, batches)[0][0]

        arrays = jax.jit(jax.vmap(run))(self.starts, self.batches)
        return np.asarray(self.scores(arrays), float).tolist()


# --- bytes --------------------------------------------------------------------------------------


def bytes_per_parameter(make: Make, codec: str) -> tuple[float, float]:
    """The bytes of state, and of scratch, that a compiled step needs for each parameter."""
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in SHAPES.items()}
    opt = sl.Optimizer(stored(make(1e-3), codec), params)
    step = jax.jit(lambda params, opt, grads: opt.step(params, grads), donate_argnums=(0, 1))
    memory = step.lower(params, opt, params).compile().memory_analysis()
    number = sum(x.size for x in params.values())
    # The arguments are parameters and gradients, and the state.
    return memory.argument_size_in_bytes / number - 8, memory.temp_size_in_bytes / number


# --- all of it ----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures what is not among the results yet."""
    results: dict[str, Any] = {
        "machine": machine(),
        "steps": 20 if args.quick else STEPS,
        "seeds": SEEDS,
        "losses": {},
        "bytes": {},
    }
    if args.load and args.load.exists():
        results = json.loads(args.load.read_text())
    codecs = [FLOAT32, *(CODECS if args.codecs is None else filter(None, args.codecs.split(",")))]
    names = args.optimizers.split(",") if args.optimizers else list(OPTIMIZERS)
    cells = [(codec, name) for codec in codecs for name in names]

    def keep(kind: str, name: str, codec: str, found: Any) -> None:
        results[kind].setdefault(name, {})[codec] = found
        if args.json:  # in between, because all of it takes minutes
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    for key in args.tasks.split(",") if args.tasks else ("text", "digits"):
        task = text(width=32, depth=1) if key == "text" else TASKS[key]()
        runs = Runs(task, results["steps"], results["seeds"])
        for codec, name in cells:
            if codec in results["losses"].get(f"{key}, {name}", {}):
                continue
            begin, (make, peak, _) = time.perf_counter(), OPTIMIZERS[name]
            found = runs.losses(make, peak, codec)
            keep("losses", f"{key}, {name}", codec, found)
            seconds = time.perf_counter() - begin
            print(key, name, codec, *(f"{x:.4f}" for x in found), f"{seconds:.0f} s", flush=True)
        if args.peers:
            for peer in filter(codec_peers.available, codec_peers.PEERS):
                if peer not in results["losses"].get(f"{key}, peers", {}):
                    found = codec_peers.losses(runs, peer, OPTIMIZERS["AdamW"][1])
                    keep("losses", f"{key}, peers", peer, found)
                    print(key, peer, *(f"{x:.4f}" for x in found), flush=True)
    if args.peers:
        for peer in filter(codec_peers.available, codec_peers.PEERS):
            keep("bytes", "peers", peer, codec_peers.bytes_per_parameter(peer, SHAPES))
    for codec, name in cells:
        if codec not in results["bytes"].get(name, {}):
            keep("bytes", name, codec, bytes_per_parameter(OPTIMIZERS[name][0], codec))
    return results


def markdown(results: dict[str, Any]) -> str:
    """A table of the losses of each task, and one of bytes."""
    texts = [
        f"The loss on held-out data, in nats, after {results['steps']} steps: the mean of "
        f"{results['seeds']} seeds, and for float32 also their range. All leaves are stored.\n"
    ]
    titles = {
        "text": "a character transformer on Python's documentation",
        "digits": "a convolutional network on scikit-learn's digits",
    }
    for key, title in titles.items():
        rows = {
            name: results["losses"][f"{key}, {name}"]
            for name in OPTIMIZERS
            if f"{key}, {name}" in results["losses"]
        }
        if rows:
            texts.append(_losses_table(title, rows))
            texts.append(_verdict(rows))
    texts.append(_bytes_table(results["bytes"]))
    if "peers" in results["bytes"]:
        texts.append(_peers_table(results, list(titles)))
    return "\n".join(texts)


def _peers_table(results: dict[str, Any], keys: list[str]) -> str:
    """The AdamW of other packages: bytes, and losses beside those of Slalom."""
    lines = []
    for codec in (
        c for c in (FLOAT32, "int8", "dynamic8", "int4") if c in results["bytes"]["AdamW"]
    ):
        means = [np.mean(results["losses"][f"{key}, AdamW"][codec]) for key in keys]
        size = results["bytes"]["AdamW"][codec][0]
        lines.append([f"Slalom, {_name(codec)}", f"{size:.2f}", *(f"{x:.3f}" for x in means)])
    for peer, size in results["bytes"]["peers"].items():
        means = [np.mean(results["losses"][f"{key}, peers"][peer]) for key in keys]
        lines.append([peer, f"{size:.2f}", *(f"{x:.3f}" for x in means)])
    return _table(["AdamW", "state, bytes per parameter", *keys], lines)


def _name(codec: str) -> str:
    return codec if codec == FLOAT32 else f'`"{codec}"`'


def _losses_table(title: str, rows: dict[str, dict[str, list[float]]]) -> str:
    codecs = [c for c in (FLOAT32, *CODECS) if any(c in row for row in rows.values())]
    lines = []
    for name, row in rows.items():
        reference = row[FLOAT32]
        spread = f"{np.mean(reference):.3f} ({min(reference):.3f}–{max(reference):.3f})"
        others = [f"{np.mean(row[c]):.3f}" if c in row else "" for c in codecs if c != FLOAT32]
        lines.append([name, spread, *others])
    return _table([title, *map(_name, codecs)], lines)


def _verdict(rows: dict[str, dict[str, list[float]]]) -> str:
    """The largest distance from float32 that a codec has with any optimizer."""
    parts = []
    for codec in CODECS:
        distances = [
            (abs(np.mean(row[codec]) - np.mean(row[FLOAT32])), name)
            for name, row in rows.items()
            if codec in row
        ]
        if distances:
            distance, name = max(distances)
            parts.append(f'{distance:.3f} for `"{codec}"` ({name})')
    return f"The largest distance from float32: {', '.join(parts)}.\n" if parts else ""


def _bytes_table(rows: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, row in rows.items():
        for codec in row if name in OPTIMIZERS else ():
            number = OPTIMIZERS[name][2]
            promised = number * (4 if codec == FLOAT32 else CODECS[codec])
            lines.append([name, _name(codec), f"{promised:.2f}", f"{row[codec][0]:.2f}"])
    heads = ["", "codec", "state, bytes per parameter, promised", "in the compiled step"]
    return _table(heads, lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="take only a few steps")
    parser.add_argument("--tasks", help="only these comma-separated tasks: text, digits")
    parser.add_argument("--optimizers", help="only these, comma-separated")
    parser.add_argument("--codecs", help="only these, comma-separated, besides float32")
    parser.add_argument("--peers", action="store_true", help="also PyTorch's 8-bit AdamW")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--load", type=Path, help="load these results, and measure what is missing")
    parser.add_argument("--docs", type=Path, help="write the tables into this page")
    args = parser.parse_args(argv)
    results = run(args)
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(results))
    return results


if __name__ == "__main__":
    main()
