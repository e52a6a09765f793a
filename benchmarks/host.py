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
BOUND_LEAVES = 10


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


def readings(leaves: int) -> dict[str, dict[str, Loop]]:
    """Reading the learning rate of an optimizer, as for a progress bar."""
    model = mlp(leaves, 8)
    params = eqx.filter(model, eqx.is_inexact_array)

    def loops(ours: Any, theirs: Any) -> dict[str, Loop]:
        opt = sl.Optimizer(sl.adamw(ours), model)
        state: Any = optax.inject_hyperparams(optax.adamw)(theirs).init(params)

        def own() -> tuple[()]:
            float(opt.hyperparams["learning_rate"])
            return ()

        def rival() -> tuple[()]:
            float(state.hyperparams["learning_rate"])
            return ()

        return {"opt.hyperparams": Loop(own), "optax.inject_hyperparams": Loop(rival)}

    return {
        "reading a number": loops(1e-3, 1e-3),
        "reading a scheduled number": loops(
            sl.schedules.cosine_decay(1e-3, 1000), optax.cosine_decay_schedule(1e-3, 1000)
        ),
    }


def bindings(leaves: int) -> dict[str, Loop]:
    """Creating the state of a new optimizer, as meta-learning does in every outer step."""
    model = mlp(leaves, 8)

    def own() -> tuple[Any]:
        return (sl.Optimizer(sl.adam(1e-3), model),)

    def rival() -> tuple[Any]:
        return (optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array)),)

    return {
        "sl.Optimizer": Loop(lambda *_: own()),
        "optax, init": Loop(lambda *_: rival()),
    }


def compare_host(calls: int, leaves: int = LEAVES) -> list[dict[str, Any]]:
    """Entries of the JSON report. The ratios compare the times until the results are ready."""
    entries = []
    rows: list[tuple[str, int, float | None, dict[str, Loop]]] = [
        ("training step", leaves, 2.0, training_steps(leaves)),
        ("step on its own", leaves, 5.0, eager_steps(leaves)),
        *((name, leaves, None, loops) for name, loops in readings(leaves).items()),
        ("binding", BOUND_LEAVES, 1.0, bindings(BOUND_LEAVES)),
    ]
    for name, of, target, loops in rows:
        returned, done = interleave(loops, calls)
        own, *_ = loops
        entries.append(
            {
                "row": name,
                "leaves": of,
                "target": target,
                "contenders": {
                    who: {"returned": spread(returned[who]), "done": spread(done[who])}
                    for who in loops
                },
                "ratios": {who: ratio(done[who], done[own]) for who in loops if who != own},
            }
        )
    return entries
