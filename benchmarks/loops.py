"""Whole training steps of small models, one call for each and many in one call.

    pip install -e ".[bench]" && python -m benchmarks.loops --docs docs/performance.md

Small models wait for the host. A scan takes many steps in one call, but a convolution in the loop
of a program is slow on CPUs.
"""

import argparse
import importlib.util
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import slalom as sl

from .docs import replace_between

BEGIN = "<!-- loops: python -m benchmarks.loops --docs docs/performance.md -->"
END = "<!-- end of loops -->"
RATE, DECAY, UNROLL = 1e-3, 1e-4, 10
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Task(NamedTuple):
    """A model with a batch, and how many steps to time at once."""

    title: str
    model: Any
    x: np.ndarray
    steps: int


def cnn(key: Any) -> eqx.nn.Sequential:
    """Two convolutions and a linear layer, for images of 28 × 28."""
    keys = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, 3, stride=2, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(16, 16, 3, stride=2, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16 * 6 * 6, 10, key=keys[2]),
        ]
    )


def tasks(steps: int) -> list[Task]:
    """An MLP and a CNN with batches of 32."""
    random = np.random.default_rng(0)
    mlp = eqx.nn.MLP(16, 10, 64, 2, key=jax.random.key(0))
    return [
        Task("MLP", mlp, random.standard_normal((32, 16), np.float32), steps),
        Task(
            "CNN",
            cnn(jax.random.key(1)),
            random.standard_normal((32, 1, 28, 28), np.float32),
            UNROLL,
        ),
    ]


def loss_fn(model: Any, x: Any) -> Any:
    """Any loss with a batch."""
    return jnp.mean((jax.vmap(model)(x) - 1) ** 2)


class Run:
    """Calls a function again and again with what it returned."""

    def __init__(self, call: Callable[..., tuple[Any, Any]], carry: Any, calls: int):
        self.call, self.carry, self.calls = call, carry, calls

    def __call__(self) -> None:
        for _ in range(self.calls):
            self.carry = self.call(*self.carry)
        jax.block_until_ready(jax.tree.leaves(self.carry))


def slalom_runs(task: Task) -> dict[str, Run]:
    """`sl.train_step` in a loop, and its `scan`."""
    x = jnp.asarray(task.x)
    step = sl.train_step(loss_fn)

    def start() -> Any:
        return task.model, sl.Optimizer(sl.adamw(RATE, weight_decay=DECAY), task.model)

    def many(unroll: int) -> Callable[..., Any]:
        return lambda model, opt: step.scan(model, opt, length=task.steps, unroll=unroll, x=x)[:2]

    return {
        "loop": Run(lambda model, opt: step(model, opt, x)[:2], start(), task.steps),
        "scan": Run(many(1), start(), 1),
        "unrolled": Run(many(UNROLL), start(), 1),
    }


def optax_runs(task: Task, filtered: bool) -> dict[str, Run]:
    """A step of Optax as in Equinox's documentation, or on the arrays of the model only."""
    x, tx = jnp.asarray(task.x), optax.adamw(RATE, weight_decay=DECAY)
    params, static = eqx.partition(task.model, eqx.is_inexact_array)
    state = tx.init(params)

    def step(params: Any, state: Any) -> Any:
        def of_arrays(params: Any) -> Any:
            return loss_fn(eqx.combine(params, static), x)

        updates, state = tx.update(jax.grad(of_arrays)(params), state, params)
        return optax.apply_updates(params, updates), state

    def many(unroll: int) -> Callable[..., Any]:
        def scan(params: Any, state: Any) -> Any:
            body = lambda carry, _: (step(*carry), None)  # noqa: E731
            return jax.lax.scan(body, (params, state), length=task.steps, unroll=unroll)[0]

        return scan

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if not filtered:
            return jax.jit(function, donate_argnums=(0, 1))

        @eqx.filter_jit
        def on_models(model: Any, state: Any) -> Any:
            params, state = function(eqx.filter(model, eqx.is_inexact_array), state)
            return eqx.combine(params, model), state

        return on_models

    def start() -> Any:
        # Copies, since a step on arrays donates them.
        copied = jax.tree.map(jnp.copy, (params, state))
        return (task.model, copied[1]) if filtered else copied

    return {
        "loop": Run(compiled(step), start(), task.steps),
        "scan": Run(compiled(many(1)), start(), 1),
        "unrolled": Run(compiled(many(UNROLL)), start(), 1),
    }


def torch_runs(task: Task, compiled: bool) -> dict[str, Run]:
    """A step of PyTorch, which has no scan."""
    import torch
    from torch import nn

    # For models of this size, its threads cost more than they save.
    torch.set_num_threads(1)

    if task.title == "MLP":
        sizes = (16, 64, 64, 10)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 6 * 6, 10),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    x = torch.tensor(task.x)

    def step() -> tuple[()]:
        optimizer.zero_grad()
        ((model(x) - 1) ** 2).mean().backward()
        optimizer.step()
        return ()

    return {"loop": Run(torch.compile(step) if compiled else step, (), task.steps)}


def contenders(with_torch: bool) -> dict[str, Callable[[Task], dict[str, Run]]]:
    """What is compared, by the name in the table."""
    found: dict[str, Callable[[Task], dict[str, Run]]] = {
        "Slalom": slalom_runs,
        "Optax, `eqx.filter_jit`": lambda task: optax_runs(task, True),
        "Optax, `jax.jit` on arrays": lambda task: optax_runs(task, False),
    }
    if with_torch:
        found["PyTorch"] = lambda task: torch_runs(task, False)
        if shutil.which("g++") or shutil.which("clang++"):  # which `torch.compile` needs
            found["PyTorch, compiled"] = lambda task: torch_runs(task, True)
    return found


def measure(steps: int, repetitions: int, with_torch: bool) -> list[dict[str, Any]]:
    """The least time of a step in µs, of runs that take turns."""
    rows = []
    for task in tasks(steps):
        made = {name: make(task) for name, make in contenders(with_torch).items()}
        runs = [(name, kind, run) for name, of in made.items() for kind, run in of.items()]
        times: dict[tuple[str, str], float] = {}
        for repetition in range(repetitions + 1):
            for name, kind, run in runs:
                start = time.perf_counter()
                run()
                if repetition:  # the first one compiles
                    taken = (time.perf_counter() - start) / task.steps * 1e6
                    times[name, kind] = min(times.get((name, kind), float("inf")), taken)
        for name, of in made.items():
            rows.append({"task": task.title, "name": name, **{k: times[name, k] for k in of}})
            print(rows[-1], flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The times as a table."""
    kinds = {"loop": "loop", "scan": "scan", "unrolled": f"scan, `unroll={UNROLL}`"}
    lines = [f"| µs per step | {' | '.join(kinds.values())} |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        cells = (f"{row[kind]:,.0f}" if kind in row else "–" for kind in kinds)
        lines.append(f"| {row['task']}, {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of the MLP in one run")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--no-torch", action="store_true", help="exclude PyTorch")
    parser.add_argument("--docs", type=Path, help="write the table into this page")
    args = parser.parse_args(given)
    rows = measure(args.steps, args.repetitions, HAS_TORCH and not args.no_torch)
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(rows))
    return rows


if __name__ == "__main__":
    main()
