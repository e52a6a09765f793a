"""Slalom on one GPU: bandwidth, matrix rules, training steps and memory.

    python -m benchmarks.gpu --json gpu.json --docs docs/performance.md

It takes less than ten minutes on an H100. `--dry` runs all of it on a tiny model, on any backend.
Steps are dispatched one after the other and awaited together, since a step of 1 ms would otherwise
be measured with the time that the host takes to start it.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import slalom as sl

from . import gpt
from .docs import _table, replace_between
from .matrices import Products, is_hidden
from .measure import Step, optax_step, slalom_step
from .shapes import TINY, gpt2

BEGIN = "<!-- gpu: python -m benchmarks.gpu --docs docs/performance.md -->"
END = "<!-- end of gpu -->"
ROUNDS = 5
TOKENS = 2**19
"""The tokens of a large batch, for the share of Muon in a training step."""


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Chained:
    """A call that starts a step without waiting for it, and the wait for all of them."""

    def __init__(self, step: Step):
        self.step = step

    def start(self) -> None:
        self.step.carry = self.step.program(*self.step.carry, self.step.grads)

    def wait(self) -> None:
        jax.block_until_ready(self.step.carry)


def seconds(calls: dict[str, Any], repetitions: int) -> dict[str, float]:
    """The median time of a step of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repetitions):
                call.start()
            call.wait()
            if number:  # the first round is a warm-up
                times[name].append((time.perf_counter() - start) / repetitions)
    return {name: statistics.median(each) for name, each in times.items()}


# --- bandwidth ------------------------------------------------------------------------------


class Copy:
    """x ← x + 1, which reads and writes each number once."""

    def __init__(self, entries: int):
        self.x = jnp.zeros(entries)
        self.bytes = 8 * entries
        self.add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def start(self) -> None:
        self.x = self.add(self.x)

    def wait(self) -> None:
        jax.block_until_ready(self.x)


def stacked(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters with the blocks stacked, as for a `jax.lax.scan` over them."""
    groups: dict[str, list[Any]] = {}
    for name, p in params.items():
        groups.setdefault(re.sub(r"block\d+", "blocks", name), []).append(p)
    return {name: jnp.stack(each) if len(each) > 1 else each[0] for name, each in groups.items()}


def bandwidth(params: dict[str, Any], repetitions: int, entries: int) -> list[dict[str, Any]]:
    """The bytes that a step moves per second, relative to a copy.

    A step must read all its arguments and write all its results, and a clip reads the gradients
    twice. With many small leaves the host takes longer to start a step than the device to run it.
    """
    clip = sl.ClipByGlobalNorm(1.0)
    cases: dict[str, tuple[Any, Any]] = {
        "AdamW": (sl.adamw(1e-3), jnp.float32),
        "AdamW, Optax": (optax.adamw(1e-3), jnp.float32),
        "clip, AdamW": (clip | sl.adamw(1e-3), jnp.float32),
        "clip, AdamW, Optax": (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            jnp.float32,
        ),
        "Lion": (sl.lion(1e-4), jnp.float32),
        'AdamW, `.store("bfloat16")`': (sl.adamw(1e-3).store("bfloat16"), jnp.float32),
        'AdamW, `.store("int8")`': (sl.adamw(1e-3).store("int8"), jnp.float32),
        'AdamW, bfloat16, `.write("stochastic")`': (
            sl.adamw(1e-3).write("stochastic"),
            jnp.bfloat16,
        ),
        "AdamW, bfloat16": (sl.adamw(1e-3), jnp.bfloat16),
    }
    number, copy = sum(p.size for p in params.values()), Copy(entries)
    rows = []
    few = stacked(params)
    measured = [(name, few, *case) for name, case in cases.items()]
    measured += [(name, params, *cases[name]) for name in ("AdamW", "AdamW, Optax")]
    for name, leaves, tx, dtype in measured:
        arrays = {path: p.astype(dtype) for path, p in leaves.items()}
        grads = jax.tree.map(lambda p: 0.01 * p + 0.001, arrays)
        make = slalom_step if isinstance(tx, sl.AbstractTransform) else optax_step
        step = make(tx, arrays, grads)
        memory = step.program.memory_analysis()
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
        moved += sum(g.nbytes for g in grads.values()) * ("clip" in name)
        took = seconds({"step": Chained(step), "copy": copy}, repetitions)
        rows.append(
            {
                "step": name,
                "leaves": len(leaves),
                "milliseconds": 1e3 * took["step"],
                "bytes_per_parameter": moved / number,
                "share_of_copy": (moved / took["step"]) / (copy.bytes / took["copy"]),
                "copy_bytes_per_second": copy.bytes / took["copy"],
            }
        )
        log(
            f"{name}, {len(leaves)} leaves: {rows[-1]['milliseconds']:.3f} ms, "
            f"{rows[-1]['share_of_copy']:.0%} of a copy"
        )
    return rows


# --- matrices -------------------------------------------------------------------------------


class Repeated:
    """A call that blocks by itself."""

    def __init__(self, call: Callable[[], Any]):
        self.start = call

    def wait(self) -> None:
        pass


def matrices(params: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Steps of matrix rules, next to their matrix products on their own, in three precisions."""
    key = jax.random.key(0)
    hidden = {
        name: 0.02 * jax.random.normal(jax.random.fold_in(key, i), p.shape)
        for i, (name, p) in enumerate(params.items())
        if is_hidden(name, p) or (len(params) < 4 and p.ndim == 2)
    }
    grads = {name: 0.1 * p[::-1] for name, p in hidden.items()}
    rows = []
    precisions = {"float32": "highest", "TensorFloat32": "tensorfloat32", "bfloat16": "bfloat16"}
    for precision, name in precisions.items():
        with jax.default_matmul_precision(name):
            link = sl.Orthogonalize()
            muon = slalom_step(link | sl.ScaleByLearningRate(0.02), hidden, grads)
            state = link.init(hidden)
            limit = Products(lambda u, link=link, state=state: link.update(u, state), grads)
            calls = {"Muon": Chained(muon), "products": Repeated(limit)}
            took = seconds(calls, repetitions)
        rows.append(
            {
                "step": "Muon",
                "precision": precision,
                "milliseconds": 1e3 * took["Muon"],
                "products_ms": 1e3 * took["products"],
            }
        )
        alone = rows[-1]["products_ms"]
        log(f"Muon, {precision}: {1e3 * took['Muon']:.2f} ms, of products {alone:.2f} ms")
    soap = slalom_step(sl.soap(3e-3), hidden, grads)  # which refreshes its bases every 10 steps
    took = seconds({"step": Chained(soap)}, 10)
    rows.append(
        {
            "step": "SOAP",
            "precision": "default",
            "milliseconds": 1e3 * took["step"],
            "products_ms": None,
        }
    )
    log(f"SOAP: {rows[-1]['milliseconds']:.1f} ms")
    return rows


# --- training steps -------------------------------------------------------------------------


class SlalomTraining:
    def __init__(self, size: gpt.Size, tokens: Any):
        self.model = gpt.GPT(size, jax.random.key(0))
        tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(3e-4)
        self.opt = sl.Optimizer(tx, self.model)
        self.step = sl.train_step(gpt.loss_fn, compute_dtype="bfloat16", donate="all")
        self.tokens, self.loss = tokens, None

    def start(self) -> None:
        self.model, self.opt, self.loss = self.step(self.model, self.opt, self.tokens)

    def wait(self) -> None:
        jax.block_until_ready((self.loss, jax.tree.leaves(self.opt)))


class OptaxTraining:
    """As in Equinox's documentation, with the model in bfloat16 inside of the loss."""

    def __init__(self, size: gpt.Size, tokens: Any):
        self.model = gpt.GPT(size, jax.random.key(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        self.state = tx.init(eqx.filter(self.model, eqx.is_inexact_array))
        self.tokens, self.loss = tokens, None

        def half(x: Any) -> Any:
            return x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x

        @eqx.filter_jit(donate="all-except-first")
        def step(tokens: Any, model: Any, state: Any) -> Any:
            loss, grads = eqx.filter_value_and_grad(
                lambda model: gpt.loss_fn(jax.tree.map(half, model), tokens)
            )(model)
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
            return eqx.apply_updates(model, updates), state, loss

        self.step = step

    def start(self) -> None:
        self.model, self.state, self.loss = self.step(self.tokens, self.model, self.state)

    def wait(self) -> None:
        jax.block_until_ready((self.loss, self.state))


class TorchTraining:
    def __init__(self, size: gpt.Size, tokens: Any, *, compiled: bool):
        import torch

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")
        self.model = gpt.torch_model(size).to(self.device)
        self.loss_of = torch.compile(self.model) if compiled else self.model
        self.tokens = torch.tensor(np.asarray(tokens), dtype=torch.long, device=self.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def start(self) -> None:
        half = self.torch.autocast(self.device, dtype=self.torch.bfloat16)
        with half if self.device == "cuda" else nullcontext():
            loss = self.loss_of(self.tokens)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def training(size: gpt.Size, repetitions: int, *, with_torch: bool) -> list[dict[str, Any]]:
    """Training steps in Slalom, in Optax under `eqx.filter_jit`, and in PyTorch."""
    tokens = gpt.batch(size)
    contenders: dict[str, Callable[[], Any]] = {
        'Slalom, `sl.train_step(donate="all")`': lambda: SlalomTraining(size, tokens),
        "Optax, `eqx.filter_jit`": lambda: OptaxTraining(size, tokens),
    }
    if with_torch:
        contenders["PyTorch, fused"] = lambda: TorchTraining(size, tokens, compiled=False)
    if with_torch and size != gpt.TINY:  # its compiler takes minutes, whatever the size
        contenders["PyTorch, fused, compiled"] = lambda: TorchTraining(size, tokens, compiled=True)
    rows = []
    for name, make in contenders.items():
        contender = make()
        start = time.perf_counter()
        contender.start()
        contender.wait()
        first = time.perf_counter() - start
        took = seconds({"step": contender}, repetitions)["step"]
        rows.append(
            {
                "step": name,
                "milliseconds": 1e3 * took,
                "first_s": first,
                "tokens": size.batch * size.length,
            }
        )
        log(f"{name}: {1e3 * took:.1f} ms, the first after {first:.1f} s")
        del contender
    return rows


# --- memory ---------------------------------------------------------------------------------


def memory(make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `sl.plan` says a step needs, and what the device has had in use.

    The peak of a device is that of the whole process, so that this comes first.
    """
    tx, params = sl.adamw(1e-3), make()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    planned = sl.plan(tx, params, mesh)
    opt, grads = sl.Optimizer(tx, params), jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(lambda p, opt, g: opt.step(p, g), donate_argnums=(0, 1))
    jax.block_until_ready(step(params, opt, grads))
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return [{"step": "AdamW", "planned": planned.total, "peak": peak}]


# --- what is printed ------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """The figures as tables."""
    copy = statistics.median(row["copy_bytes_per_second"] for row in found["bandwidth"])
    parts = [
        f"Measured on one {found['device']} with JAX {found['jax']}, on the leaves of "
        f"{found['model']}. A copy moves {copy / 1e12:.2f} TB/s.",
        _table(
            ["step", "leaves", "time", "bytes per parameter", "share of a copy"],
            [
                [
                    row["step"],
                    f"{row['leaves']}",
                    f"{row['milliseconds']:.2f} ms",
                    f"{row['bytes_per_parameter']:.1f}",
                    f"**{row['share_of_copy']:.0%}**",
                ]
                for row in found["bandwidth"]
            ],
        ),
    ]
    heads = ["step on the hidden matrices", "precision of products", "time", "products alone"]
    lines = [
        [
            row["step"],
            row["precision"],
            f"{row['milliseconds']:.2f} ms",
            f"{row['products_ms']:.2f} ms" if row["products_ms"] else "",
        ]
        for row in found["matrices"]
    ]
    parts.append(_table(heads, lines))
    first = found["training"][0]
    tokens = first["tokens"]
    batch = first["milliseconds"] * TOKENS / tokens
    tensor = next(r for r in found["matrices"] if r["precision"] == "TensorFloat32")
    parts.append(
        f"At {TOKENS} tokens, a training step of this model takes about {batch:.0f} ms, of which "
        f"Muon's {tensor['milliseconds']:.1f} ms are {tensor['milliseconds'] / batch:.1%}."
    )
    lines = [
        [
            row["step"],
            f"{row['milliseconds']:.1f} ms",
            f"{row['milliseconds'] / first['milliseconds']:.2f}",
            f"{row['first_s']:.0f} s",
        ]
        for row in found["training"]
    ]
    heads = [f"training step, {tokens} tokens", "time", "relative to Slalom", "first step"]
    parts.append(_table(heads, lines))
    for row in found["memory"]:
        if row["peak"]:
            parts.append(
                f"A step of AdamW takes {row['planned'] / 1e9:.3f} GB according to `sl.plan`; the "
                f"device had {row['peak'] / 1e9:.3f} GB in use."
            )
    return "\n\n".join(parts)


def run(args: argparse.Namespace) -> dict[str, Any]:
    make = TINY["tiny"].make if args.dry else gpt2
    size = gpt.TINY if args.dry else gpt.SMALL
    repetitions, entries = (2, 2**10) if args.dry else (20, 2**28)
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": "a tiny model" if args.dry else "GPT-2 small (124 M parameters)",
    }
    few = max(2, repetitions // 2)
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "memory": lambda: memory(make),  # first: it reads the peak of the whole process
        "bandwidth": lambda: bandwidth(make(), repetitions, entries),
        "training": lambda: training(size, few, with_torch=not args.no_torch),
        "matrices": lambda: matrices(make(), few),
    }
    for name, measure in sections.items():
        found[name] = measure()
        if args.json:  # after each section, since a lent device may be taken back
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
    parser.add_argument("--no-torch", action="store_true", help="exclude PyTorch")
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
