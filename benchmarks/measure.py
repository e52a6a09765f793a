"""What is measured: compiled steps side by side, and what their programs look like."""

import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import slalom as sl

from . import torch_rival
from .rows import Row

WARM_UP = 4
"""Repetitions that do not count; a multiple of every window."""

PROBE = "bandwidth probe"
PROBE_BYTES = 3 * 4 * 2**25


@dataclass(frozen=True)
class Cost:
    """What a program costs beside time."""

    trace_s: float
    compile_s: float
    scratch_bytes: int
    peak_bytes: int
    fusions: int
    """Kernels that XLA made of several operations."""
    copies: int
    """Copies of arrays as large as a parameter."""


def fusions(hlo: str) -> int:
    """How many fused kernels an optimized program has."""
    return len(re.findall(r" = (?:\(.*?\)|\S+) fusion\(", hlo))


def copies(hlo: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """How many copies of arrays of these shapes an optimized program makes."""
    texts = {",".join(map(str, shape)) for shape in shapes if shape}
    return sum(shape in texts for shape in re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", hlo))


class Step:
    """One optimizer's compiled step, which gives its parameters and state away at each call."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, grads: Any):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        start = time.perf_counter()
        trace = jitted.trace(params, state, grads)
        traced = time.perf_counter()
        self.program: Any = trace.lower().compile()
        compiled = time.perf_counter()
        memory, text = self.program.memory_analysis(), self.program.as_text()
        self.cost = Cost(
            trace_s=traced - start,
            compile_s=compiled - traced,
            scratch_bytes=memory.temp_size_in_bytes,
            # What goes in and out, shared buffers once. XLA's own figure leaves out the scratch.
            peak_bytes=memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
            fusions=fusions(text),
            copies=copies(text, {p.shape for p in jax.tree.leaves(params)}),
        )
        self.carry = jax.tree.map(jnp.copy, (params, state))
        self.grads = grads

    def __call__(self) -> None:
        self.carry = jax.block_until_ready(self.program(*self.carry, self.grads))


def trace_once(row: Row) -> None:
    """Fills the caches that all libraries share, so that the first one pays for no other."""
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    opt, theirs = sl.Optimizer(row.slalom(), params), row.optax()
    state = theirs.init(params)
    jax.jit(lambda opt: opt.step(params, params)).trace(opt)
    jax.jit(lambda state: theirs.update(params, state, params)).trace(state)


def slalom_step(tx: sl.AbstractTransform, params: Any, grads: Any) -> Step:
    """Slalom under a `jax.jit` of the user's."""

    def step(params: Any, opt: sl.Optimizer, grads: Any) -> Any:
        return opt.step(params, grads)

    return Step(step, params, sl.Optimizer(tx, params), grads)


def optax_step(tx: Any, params: Any, grads: Any) -> Step:
    """Optax as its documentation shows it, under a `jax.jit` of the user's."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Step(step, params, tx.init(params), grads)


class Probe:
    """y ← y + a·x over 2²⁵ numbers: the rate at which this machine moves memory, here and now."""

    def __init__(self) -> None:
        self.x = jnp.ones(2**25)
        self.y = jnp.ones(2**25)
        self.axpy = jax.jit(lambda y, x: y + 0.5 * x, donate_argnums=0)

    def __call__(self) -> None:
        self.y = jax.block_until_ready(self.axpy(self.y, self.x))


def interleave(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds per call: each once, in turn, again and again, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, shuffled = list(calls), random.Random(0)
    for repetition in range(repetitions + WARM_UP):
        # What ran before leaves its arrays in the cache and its threads awake, and so must not be
        # the same each time, as it would be in a cycle.
        shuffled.shuffle(names)
        for name in names:
            start = time.perf_counter()
            calls[name]()
            spent = time.perf_counter() - start
            if repetition >= WARM_UP:
                times[name].append(spent)
    return times


def windows(times: list[float], length: int) -> list[float]:
    """The mean of each window."""
    return [statistics.fmean(times[i : i + length]) for i in range(0, len(times), length)]


def idle(times: list[float], length: int) -> list[float]:
    """All but the last of each window."""
    return [t for i, t in enumerate(times) if (i + 1) % length]


def spread(values: list[float]) -> dict[str, float]:
    """The median, and the quartiles around it."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(rival: list[float], ours: list[float]) -> dict[str, float]:
    """How many times longer the rival took, repetition by repetition."""
    return spread([theirs / own for theirs, own in zip(rival, ours, strict=True)])


def compare_steps(
    name: str, row: Row, params: Any, repetitions: int, *, with_torch: bool
) -> list[dict[str, Any]]:
    """One row on one tree of parameters, in all libraries; also its idle steps, where it has any.

    **Returns:** entries as `report` writes them to JSON.
    """
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
    numbers = sum(p.size for p in jax.tree.leaves(params))
    trace_once(row)
    calls: dict[str, Any] = {
        "slalom": slalom_step(row.slalom(), params, grads),
        "optax": optax_step(row.optax(), params, grads),
    }
    if with_torch and row.torch:
        calls |= torch_rival.steps(row.torch, jax.tree.leaves(params))
    times = interleave(calls | {PROBE: Probe()}, repetitions)
    rate = PROBE_BYTES / statistics.median(times.pop(PROBE))
    costs = {who: asdict(call.cost) for who, call in calls.items() if isinstance(call, Step)}

    def entry(
        name: str, limit: float, target: float, seconds: Callable[[list[float]], list[float]]
    ) -> dict[str, Any]:
        contenders = {}
        for who, each in times.items():
            taken = spread(seconds(each))
            contenders[who] = {
                "seconds": taken,
                "ns_per_parameter": 1e9 * taken["median"] / numbers,
                "share_of_limit": limit * numbers / rate / taken["median"],
                **costs.get(who, {}),
            }
        return {
            "row": name,
            "leaves": len(jax.tree.leaves(params)),
            "parameters": numbers,
            "parameter_bytes": sum(p.nbytes for p in jax.tree.leaves(params)),
            "bytes_per_second": rate,
            "limit_bytes_per_parameter": limit,
            "target": target,
            "scratch_target": row.scratch,
            "ratios": {
                who: ratio(seconds(each), seconds(times["slalom"]))
                for who, each in times.items()
                if who != "slalom"
            },
            "contenders": contenders,
        }

    entries = [entry(name, row.limit, row.target, lambda each: windows(each, row.window))]
    if row.window > 1:
        limit, target = row.idle_limit, row.idle_target
        entries.append(
            entry(f"{name}, idle step", limit, target, lambda each: idle(each, row.window))
        )
    return entries
