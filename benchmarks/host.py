"""Host time of a call, measured with a model of 100 small leaves that is cheap to compute."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import slalom as sl

from .measure import WARM_UP, ratio, spread
from .shapes import mlp

LEAVES = 100


def loss_fn(model: Any, x: Any) -> Any:
    """A loss with a cheap gradient."""
    return jnp.mean(jax.vmap(model)(x) ** 2)


class Loop:
    """A function that is called repeatedly with its own results."""

    def __init__(self, call: Callable[..., Any], *carry: Any):
        self.call = call
        self.carry = carry

    def __call__(self) -> None:
        self.carry = self.call(*self.carry)


def interleave(loops: Mapping[str, Loop], calls: int) -> tuple[dict[str, list[float]], ...]:
    """Seconds until each call returns, and until its results are ready."""
    returned: dict[str, list[float]] = {name: [] for name in loops}
    done: dict[str, list[float]] = {name: [] for name in loops}
    names, shuffled = list(loops), random.Random(0)
    for i in range(calls + WARM_UP):
        shuffled.shuffle(names)
        for name in names:
            loop = loops[name]
            start = time.perf_counter()
            loop()
            between = time.perf_counter()
            jax.block_until_ready(loop.carry)
            end = time.perf_counter()
            if i >= WARM_UP:
                returned[name].append(between - start)
                done[name].append(end - start)
    return returned, done


def optimizers() -> tuple[sl.AbstractTransform, Any]:
    """The same optimizer in Slalom and in Optax."""
    ours = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)
    return ours, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def training_steps(leaves: int) -> dict[str, Loop]:
    """Training steps that compute the gradient and the update in one program."""
    model, x = mlp(leaves, 8), jnp.ones((2, 8))
    ours, theirs = optimizers()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    step = sl.train_step(loss_fn, donate="all")

    @eqx.filter_jit
    def optax_step(model: Any, state: Any) -> Any:
        grads = eqx.filter_grad(loss_fn)(model, x)
        updates, state = theirs.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    flat, structure = jax.tree.flatten((params, theirs.init(params)))

    def raw(flat: list[Any]) -> list[Any]:
        params, state = structure.unflatten(flat)
        grads = jax.grad(lambda p: loss_fn(eqx.combine(p, static), x))(params)
        updates, state = theirs.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    raw_step = jax.jit(raw, donate_argnums=0)
    own = eqx.combine(jax.tree.map(jnp.copy, params), static)
    return {
        "sl.train_step": Loop(lambda m, o: step(m, o, x)[:2], own, sl.Optimizer(ours, own)),
        "optax, eqx.filter_jit": Loop(optax_step, model, theirs.init(params)),
        "optax, jax.jit on flat lists": Loop(
            lambda f: (raw_step(f),), jax.tree.map(jnp.copy, flat)
        ),
    }


def eager_steps(leaves: int) -> dict[str, Loop]:
    """Steps from given gradients, outside of any user `jit`."""
    model = mlp(leaves, 8)
    ours, theirs = optimizers()
    params = eqx.filter(model, eqx.is_inexact_array)
    grads = jax.tree.map(lambda p: 0.01 * p, params)

    def update(model: Any, state: Any) -> Any:
        updates, state = theirs.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    return {
        "opt.step": Loop(lambda m, o: o.step(m, grads), model, sl.Optimizer(ours, model)),
        "optax, eager": Loop(update, model, theirs.init(params)),
        "optax, eqx.filter_jit": Loop(eqx.filter_jit(update), model, theirs.init(params)),
    }


def compare_host(calls: int, leaves: int = LEAVES) -> list[dict[str, Any]]:
    """Entries of the JSON report. The ratios compare the times until the results are ready."""
    entries = []
    for name, make, target in (
        ("training step", training_steps, 2.0),
        ("step on its own", eager_steps, 5.0),
    ):
        loops = make(leaves)
        returned, done = interleave(loops, calls)
        own, *_ = loops
        entries.append(
            {
                "row": name,
                "leaves": leaves,
                "target": target,
                "contenders": {
                    who: {"returned": spread(returned[who]), "done": spread(done[who])}
                    for who in loops
                },
                "ratios": {who: ratio(done[who], done[own]) for who in loops if who != own},
            }
        )
    return entries
