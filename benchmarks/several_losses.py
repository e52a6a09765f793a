"""Losses with several terms: what combined gradients cost, and weights for a PINN.

    python -m benchmarks.several_losses --docs docs/guides/more-gradients.md

The first table times steps of UPGrad along one weighted gradient, as `tx.combine` takes them,
against steps that stack the gradients of all terms. The second one solves u'' + u = f with a
physics-informed network, whose residual outweighs the boundary values.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl
from slalom.combine import Terms

from .docs import replace_between
from .shapes import mlp

BEGIN = "<!-- losses: python -m benchmarks.several_losses --docs docs/guides/more-gradients.md -->"
END = "<!-- end of losses -->"
NAMES = ("square", "absolute", "quartic")
UPGRAD = sl.combine.UPGrad()


def terms(model: Any, x: Any) -> dict[str, Any]:
    """Three losses of one model."""
    error = jax.vmap(model)(x) - x
    return {
        "square": jnp.mean(error**2),
        "absolute": jnp.mean(jnp.abs(error - 1)),
        "quartic": jnp.mean((error + 1) ** 4),
    }


def stacked_step(batched: bool) -> Any:
    """A step of UPGrad that stacks gradients: of a pass for each term, or of one for all."""

    @eqx.filter_jit(donate="all-except-first")
    def step(x: Any, model: Any, opt: Any) -> Any:
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def losses_of(params: Any) -> Any:
            return jnp.stack(list(terms(eqx.combine(params, static), x).values()))

        losses, pullback = jax.vjp(losses_of, params)
        if batched:
            (stacked,) = jax.vmap(pullback)(jnp.eye(len(NAMES)))
        else:
            each = [pullback(row)[0] for row in jnp.eye(len(NAMES))]
            stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
        flat = [g.reshape(len(NAMES), -1) for g in jax.tree.leaves(stacked)]
        weights, _ = UPGRAD.at_step(Terms(losses, sum(g @ g.T for g in flat)), None, None)
        grads = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), stacked)
        model, opt = opt.step(model, grads)
        return model, opt

    return step


def costs(layers: int, width: int, repetitions: int) -> list[tuple[str, float, float]]:
    """Milliseconds and scratch memory over that of the parameters, of steps that take turns."""
    x = jnp.ones((64, width)) * jnp.linspace(0, 1, 64)[:, None]
    tx = sl.adamw(1e-3)
    size = sum(
        leaf.nbytes for leaf in jax.tree.leaves(mlp(2 * layers, width)) if eqx.is_array(leaf)
    )
    programs: dict[str, Any] = {}
    for name, rule in (("their sum", tx), ("`tx.combine`", tx.combine(UPGRAD, NAMES))):
        step = sl.train_step(terms, donate="all")
        model = jax.tree.map(
            lambda p: jnp.copy(p) if eqx.is_array(p) else p, mlp(2 * layers, width)
        )
        opt = sl.Optimizer(rule, model)
        scratch = step.lower(model, opt, x).compile().memory_analysis().temp_size_in_bytes
        programs[name] = [lambda m, o, step=step: step(m, o, x)[:2], (model, opt), scratch]
    for name, batched in (("stacked, a pass for each", False), ("stacked, `vmap`", True)):
        step = stacked_step(batched)
        model = jax.tree.map(
            lambda p: jnp.copy(p) if eqx.is_array(p) else p, mlp(2 * layers, width)
        )
        opt = sl.Optimizer(tx, model)
        memory = step.lower(x, model, opt).compile().compiled.memory_analysis()
        call = lambda m, o, step=step: step(x, m, o)  # noqa: E731
        programs[name] = [call, (model, opt), memory.temp_size_in_bytes]
    best = dict.fromkeys(programs, float("inf"))
    for repetition in range(repetitions + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            program[1] = jax.block_until_ready(program[0](*program[1]))
            if repetition:  # the first one compiles
                best[name] = min(best[name], time.perf_counter() - start)
    return [(name, 1e3 * best[name], program[2] / size) for name, program in programs.items()]


POINTS = jnp.linspace(-1, 1, 128)
FREQUENCY = 2 * np.pi


def u(model: Any, x: Any) -> Any:
    """The network at one point."""
    return model(x[None])


def residuals(model: Any) -> tuple[Any, Any]:
    """What the equation leaves over inside, and the values at the boundary."""
    values = jax.vmap(u, (None, 0))(model, POINTS)
    second = jax.vmap(jax.grad(jax.grad(u, 1), 1), (None, 0))(model, POINTS)
    force = (1 - FREQUENCY**2) * jnp.sin(FREQUENCY * POINTS)
    return second + values - force, values[jnp.array([0, -1])]


def both_losses(model: Any) -> dict[str, Any]:
    """The two terms."""
    inside, boundary = residuals(model)
    return {"inside": jnp.mean(inside**2), "boundary": jnp.mean(boundary**2)}


def weighted_loss(model: Any) -> Any:
    """Their sum with a weight for each end, which are parameters."""
    inside, boundary = residuals(model["u"])
    return jnp.mean(inside**2) + jnp.mean((model["weights"] * boundary) ** 2)


def errors(steps: int, seeds: int) -> list[tuple[str, list[float]]]:
    """The errors relative to the solution, in the L² norm, after equal numbers of steps."""
    adam, names = sl.adam(sl.schedules.cosine_decay(3e-3, steps)), ("inside", "boundary")
    ascending = adam.partition({sl.where.path("weights"): sl.adam(0.1).maximize()})
    cases: dict[str, tuple[Any, Any]] = {
        "their sum": (adam, both_losses),
        "a weight for each end, which ascends": (ascending, weighted_loss),
        "`sl.combine.ReLoBRaLo()`": (adam.combine(sl.combine.ReLoBRaLo(), names), both_losses),
        "`sl.combine.UPGrad()`": (adam.combine(UPGRAD, names), both_losses),
    }
    exact, rows = jnp.sin(FREQUENCY * POINTS), []
    for name, (tx, loss_fn) in cases.items():
        step, found = sl.train_step(loss_fn), []
        for seed in range(seeds):
            network = eqx.nn.MLP(1, "scalar", 32, 3, jnp.tanh, key=jax.random.key(seed))
            model: Any = {"u": network, "weights": jnp.ones(2)} if tx is ascending else network
            model, _, _ = step.scan(model, sl.Optimizer(tx, model), length=steps)
            network = model["u"] if tx is ascending else model
            values = jax.vmap(u, (None, 0))(network, POINTS)
            found.append(float(jnp.linalg.norm(values - exact) / jnp.linalg.norm(exact)))
        rows.append((name, found))
        print(*rows[-1], flush=True)
    return rows


def markdown(cost: list[tuple[str, float, float]], error: list[tuple[str, list[float]]]) -> str:
    """Both tables."""
    lines = ["| a step along the gradient of | ms | scratch memory / parameters |"]
    lines += ["| --- | ---: | ---: |"]
    lines += [f"| {name} | {ms:.1f} | {scratch:.2f} |" for name, ms, scratch in cost]
    lines += ["", "| weights of the terms | relative error, of each seed |", "| --- | ---: |"]
    lines += [f"| {name} | {', '.join(f'{x:.1e}' for x in found)} |" for name, found in error]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> tuple[Any, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.several_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the network")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", type=Path, help="write the tables into this page")
    args = parser.parse_args(given)
    cost = costs(args.layers, args.width, args.repetitions)
    error = errors(args.steps, args.seeds)
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(cost, error))
    return cost, error


if __name__ == "__main__":
    main()
