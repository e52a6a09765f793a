"""Slalom beside Optax, in one process, interleaved: time, scratch, tracing, compiling, host time.

    pip install -e ".[bench]" && python -m benchmarks

Ratios are Optax over Slalom: above 1, Slalom is ahead. Absolute times drift with the machine;
compare ratios taken in one run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import slalom as sl

from .rows import ROWS
from .shapes import gpt2, many_leaves, mlp


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


class Contender:
    """One optimizer's compiled, donating step, and what it costs to get there."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, grads: Any):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        start = time.perf_counter()
        traced = jitted.trace(params, state, grads)
        self.trace = time.perf_counter() - start
        lowered = traced.lower()
        start = time.perf_counter()
        self.program = lowered.compile()
        self.compile = time.perf_counter() - start
        self.scratch = self.program.memory_analysis().temp_size_in_bytes
        # Copies: the step gives their buffers away.
        self.carry = jax.tree.map(jnp.copy, (params, state))
        self.grads = grads
        self.times: list[float] = []

    def step(self) -> None:
        spent, self.carry = seconds(lambda: self.program(*self.carry, self.grads))
        self.times.append(spent)


def contenders(ours: Any, theirs: Any, params: Any) -> tuple[Contender, Contender]:
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)

    def optax_step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return (
        Contender(lambda p, opt, g: opt.step(p, g), params, sl.Optimizer(ours, params), grads),
        Contender(optax_step, params, theirs.init(params), grads),
    )


def compare_steps(params: Any, steps: int, title: str) -> Table:
    numbers = sum(p.size for p in jax.tree.leaves(params))
    table = Table(title=f"{title}: {len(params)} leaves, {numbers / 1e6:.1f} M float32 parameters")
    for column in ("", "ns/parameter", "optax", "ratio", "scratch", "optax", "trace s", "optax",
                   "compile s", "optax"):  # fmt: skip
        table.add_column(column, justify="left" if not column else "right")
    for name, (ours, theirs) in ROWS.items():
        pair = contenders(ours, theirs, params)
        for _ in range(steps):
            for contender in pair:
                contender.step()
        # Means, so that a window of `every_k` counts as a whole; the first window warms up.
        ns = [statistics.fmean(c.times[4:]) / numbers * 1e9 for c in pair]
        share = [f"{c.scratch / (4 * numbers):.1%}" for c in pair]
        spent = [f"{t:.2f}" for t in (*(c.trace for c in pair), *(c.compile for c in pair))]
        table.add_row(name, *(f"{x:.2f}" for x in ns), f"{ns[1] / ns[0]:.2f}", *share, *spent)
    return table


def host_time(calls: int) -> tuple[float, float]:
    """Microseconds per call of a training step on a model of 100 leaves: ours, and Optax's."""

    def loss_fn(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    model, x = mlp(), jnp.ones((2, 4))
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = sl.train_step(loss_fn, donate=False)
    opt = sl.Optimizer(sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3), model)

    @eqx.filter_jit
    def optax_step(model: Any, state: Any, x: Any) -> Any:
        grads = eqx.filter_grad(loss_fn)(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = theirs.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    ours = lambda: step(model, opt, x)[1].leaves  # noqa: E731  two calls side by side
    state = theirs.init(eqx.filter(model, eqx.is_inexact_array))
    rival = lambda: jax.tree.leaves(optax_step(model, state, x)[1])  # noqa: E731
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls):
        for call, spent in zip((ours, rival), times, strict=True):
            spent.append(seconds(call)[0])
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the parameters")
    args = parser.parse_args()
    console = Console()
    console.print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {jax.device_count()} device"
    )
    fraction = 8 if args.quick else 1
    console.print(compare_steps(gpt2(fraction), 24, "GPT-2 small" + " / 8" * args.quick))
    if not args.quick:
        console.print(compare_steps(many_leaves(), 24, "many leaves"))
    ours, theirs = host_time(200)
    console.print(
        f"host time of a training step on 100 leaves, wait included: train_step {ours:.0f} µs, "
        f"optax under eqx.filter_jit {theirs:.0f} µs, ratio {theirs / ours:.2f}"
    )


if __name__ == "__main__":
    main()
