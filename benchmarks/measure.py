"""Measures compiled steps, and counts the operations of their programs."""

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
"""The number of warm-up repetitions; a multiple of every window that has idle steps."""

PROBE = "bandwidth probe"
PROBE_BYTES = 3 * 4 * 2**25


@dataclass(frozen=True)
class Cost:
    """The costs of a program other than its run time."""

    trace_s: float
    compile_s: float
    scratch_bytes: int
    peak_bytes: int
    fusions: int
    """The number of fused kernels."""
    copies: int
    """The number of copies of arrays with the shape of a parameter."""


def fusions(hlo: str) -> int:
    """The number of fused kernels in an optimized program."""
    return len(re.findall(r" = (?:\(.*?\)|\S+) fusion\(", hlo))


def copies(hlo: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """The number of copies of arrays of these shapes in an optimized program."""
    texts = {",".join(map(str, shape)) for shape in shapes if shape}
    return sum(shape in texts for shape in re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", hlo))


class Step:
    """The compiled step of an optimizer, which donates its parameters and state."""

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
            # Inputs and outputs, shared buffers counted once. XLA's own figure excludes scratch.
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
    """Fills the caches that all libraries share, so that no trace pays for the others."""
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    opt, theirs = sl.Optimizer(row.slalom(), params), row.optax()
    state = theirs.init(params)
    known = {} if row.loss is None else {"obj_fn": row.loss}
    jax.jit(lambda opt: opt.step(params, params, value_fn=row.loss)).trace(opt)
    jax.jit(lambda state: theirs.update(params, state, params, **known)).trace(state)


def functions_of(tx: Any, loss: Any = None) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """The functions that make the state and a step, with Slalom, or with Optax as it documents."""

    def ours(params: Any, opt: sl.Optimizer, grads: Any) -> Any:
        return opt.step(params, grads, value_fn=loss)

    def theirs(params: Any, state: Any, grads: Any) -> Any:
        known = {} if loss is None else {"obj_fn": loss}
        updates, state = tx.update(grads, state, params, **known)
        return optax.apply_updates(params, updates), state

    if isinstance(tx, sl.AbstractTransform):
        return (lambda params: sl.Optimizer(tx, params)), ours
    return tx.init, theirs


def step_of(tx: Any, params: Any, grads: Any, loss: Any = None) -> Step:
    """A step of a transform of Slalom or Optax under `jax.jit`."""
    init, step = functions_of(tx, loss)
    return Step(step, params, init(params), grads)


class Probe:
    """y ← y + a·x for 2²⁵ elements, which measures the current memory bandwidth."""

    def __init__(self) -> None:
        self.x = jnp.ones(2**25)
        self.y = jnp.ones(2**25)
        self.axpy = jax.jit(lambda y, x: y + 0.5 * x, donate_argnums=0)

    def __call__(self) -> None:
        self.y = jax.block_until_ready(self.axpy(self.y, self.x))


def interleave(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds per call. The calls take turns, so that all run under the same conditions."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, shuffled = list(calls), random.Random(0)
    for repetition in range(repetitions + WARM_UP):
        # A call leaves its arrays in the cache and its threads awake for the next one. A random
        # order spreads this effect over all calls.
        shuffled.shuffle(names)
        for name in names:
            start = time.perf_counter()
            calls[name]()
            spent = time.perf_counter() - start
            if repetition >= WARM_UP:
                times[name].append(spent)
    return times


def windows(times: list[float], length: int) -> list[float]:
    """The mean time of each window."""
    return [statistics.fmean(times[i : i + length]) for i in range(0, len(times), length)]


def idle(times: list[float], length: int) -> list[float]:
    """The times of all steps but the last of each window."""
    return [t for i, t in enumerate(times) if (i + 1) % length]


def spread(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(rival: list[float], ours: list[float]) -> dict[str, float]:
    """The time of a rival divided by ours, paired by repetition."""
    return spread([theirs / own for theirs, own in zip(rival, ours, strict=True)])


def compare_steps(
    name: str, row: Row, params: Any, repetitions: int, *, with_torch: bool
) -> list[dict[str, Any]]:
    """Measures one row with given parameters in all libraries, and its idle steps separately.

    **Returns:** entries of the JSON report.
    """
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, params)
    numbers = sum(p.size for p in jax.tree.leaves(params))
    trace_once(row)
    calls: dict[str, Any] = {
        "slalom": step_of(row.slalom(), params, grads, row.loss),
        "optax": step_of(row.optax(), params, grads, row.loss),
    }
    if with_torch and row.torch:
        calls |= torch_rival.steps(row.torch, jax.tree.leaves(params))
    # Whole windows. Each has one step of every phase, wherever it begins.
    times = interleave(calls | {PROBE: Probe()}, -(-repetitions // row.window) * row.window)
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
    if row.idle_limit:
        limit, target = row.idle_limit, row.idle_target
        entries.append(
            entry(f"{name}, idle step", limit, target, lambda each: idle(each, row.window))
        )
    return entries
