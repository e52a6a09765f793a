"""Small programs: a least-squares fit in single precision, and loops over many steps."""

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

from ..curvature import poisson
from .timing import Repeated, log, seconds


def fits(steps: int) -> list[dict[str, Any]]:
    """The errors of Levenberg–Marquardt on Poisson's equation in float32, by precision."""
    rows = []
    for precision in ("highest", "tensorfloat32"):
        loss_fn, model, batches, error = poisson(0)
        opt = sl.Optimizer(sl.levenberg_marquardt(), model)
        step = sl.train_step(loss_fn)
        with jax.default_matmul_precision(precision):
            model, opt, _ = step(model, opt, *batches(0))
            start = time.perf_counter()
            for i in range(1, steps):
                model, opt, _ = step(model, opt, *batches(i))
            jax.block_until_ready(jax.tree.leaves(opt))
        took = 1e3 * (time.perf_counter() - start) / (steps - 1)
        rows.append({"precision": precision, "milliseconds": took, "error": float(error(model))})
        log(f"Levenberg–Marquardt, {rows[-1]}")
    return rows


def loops(steps: int) -> list[dict[str, Any]]:
    """Training steps of a small network, in a loop and in `step.scan`."""
    model = eqx.nn.MLP(64, 10, 64, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (steps, 32, 64))

    def loss_fn(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    opt, step = sl.Optimizer(sl.adamw(1e-3), model), sl.train_step(loss_fn, donate=False)

    def loop() -> Any:
        own, found = opt, model
        for batch in x:
            found, own, _ = step(found, own, batch)
        return jax.block_until_ready(jax.tree.leaves(own))

    def scan() -> Any:
        return jax.block_until_ready(jax.tree.leaves(step.scan(model, opt, x)[1]))

    calls = {"loop": Repeated(loop), "scan": Repeated(scan)}
    took = seconds(calls, 1)
    row = {f"{name}_us": 1e6 * each / steps for name, each in took.items()}
    log(f"a small network: {row}")
    return [row]


def text(found: dict[str, Any]) -> list[str]:
    """The tables and sentences for the page."""
    parts = []
    if rows := found.get("fits"):
        errors = " and ".join(f"{row['error']:.1e} ({row['precision']})" for row in rows)
        parts.append(
            f"Levenberg–Marquardt on Poisson's equation in float32 reaches an error of {errors}."
        )
    for row in found.get("loops", []):
        parts.append(
            f"A training step of an MLP 64-64-64-10 takes {row['loop_us']:.0f} µs in a loop and "
            f"{row['scan_us']:.0f} µs in `step.scan`."
        )
    return parts
