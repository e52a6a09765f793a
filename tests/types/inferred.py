"""What a type checker infers. Read by `tests/core/test_types.py`, never run.

The comment above a line is what the checker says of it.
"""

from typing import Any, reveal_type

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

import slalom as sl

model: eqx.nn.MLP = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
opt = sl.Optimizer(sl.adam(1e-3), model)
x, y = jnp.ones((4, 2)), jnp.zeros((4, 1))


def loss_fn(model: eqx.nn.MLP, x: Array, y: Array) -> Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def aux_fn(model: eqx.nn.MLP, x: Array) -> tuple[Array, dict[str, Array]]:
    return jnp.sum(x), {"x": x}


def weight_fn(model: eqx.nn.MLP, x: Array) -> tuple[Array, Array]:
    return jnp.sum(x), jnp.ones(())


def both_fn(model: eqx.nn.MLP, x: Array) -> tuple[Array, Array, list[int]]:
    return jnp.sum(x), jnp.ones(()), [1]


def unannotated(model, x):
    return jnp.sum(x), {"x": 1}


# tuple[MLP, Optimizer]
reveal_type(opt.step(model, model))
# Optimizer
reveal_type(opt.update(model, model)[1])
# MLP
reveal_type(opt.eval_params(model))
# MLP
reveal_type(sl.apply_updates(model, model))
# Optimizer
reveal_type(opt.reset(model))
# Optimizer
reveal_type(opt.with_hyperparams(learning_rate=1e-3))
# ScaleByAdam
reveal_type(sl.adam(1e-3)[sl.ScaleByAdam])
# ClipByGlobalNorm
reveal_type((sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3))[sl.ClipByGlobalNorm])
# AbstractTransform[Any]
reveal_type(sl.adam(1e-3)[0])
# EveryK
reveal_type(sl.adam(1e-3).every_k(2))

# tuple[MLP, Optimizer, Array]
reveal_type(sl.train_step(loss_fn)(model, opt, x, y))
# tuple[MLP, Optimizer, tuple[Array, dict[str, Array]]]
reveal_type(sl.train_step(aux_fn, has_aux=True)(model, opt, x))
# tuple[MLP, Optimizer, tuple[Array, Array]]
reveal_type(sl.train_step(weight_fn, has_weight=True)(model, opt, x))
# tuple[MLP, Optimizer, tuple[Array, Array, list[int]]]
reveal_type(sl.train_step(both_fn, has_aux=True, has_weight=True)(model, opt, x))
# tuple[MLP, Optimizer, tuple[Array, dict[str, int]]]
reveal_type(sl.train_step(unannotated, has_aux=True)(model, opt, x))
# tuple[MLP, Optimizer, Array]
reveal_type(sl.train_step(loss_fn)(model, opt, x, y=y, context={"weight": 2}))


@sl.train_step
def bare(model: eqx.nn.MLP, x: Array, *, scale: float = 1.0) -> Array:
    return scale * jnp.sum(x)


@sl.train_step(has_aux=True, donate="all")
def decorated(model: eqx.nn.MLP, x: Array) -> tuple[Array, str]:
    return jnp.sum(x), "aux"


@sl.train_step(microbatches=2)
def without_aux(model: eqx.nn.MLP, x: Array) -> Array:
    return jnp.sum(x)


# TrainStep[(x: Array, *, scale: float = 1), Array]
reveal_type(bare)
# tuple[MLP, Optimizer, Array]
reveal_type(bare(model, opt, x, scale=2.0))
# tuple[MLP, Optimizer, tuple[Array, str]]
reveal_type(decorated(model, opt, x))
# tuple[MLP, Optimizer, Array]
reveal_type(without_aux(model, opt, x))

# error
bare(model, opt)
# error
bare(model, opt, x, factor=2.0)
# error
sl.train_step(loss_fn, donate=True)


def loop(model: dict[str, Any], opt: sl.Optimizer) -> dict[str, Any]:
    for _ in range(3):
        model, opt, _ = bare(model, opt, x)
    # dict[str, Any]
    reveal_type(model)
    return model


class LastState(eqx.Module):
    last: Array


class Last(sl.AbstractRule[LastState]):
    share: sl.fields.Number = sl.fields.hyperparameter(0.5)

    def begin(self, state):
        self.rest = 1 - self.share

    def direction(self, g, leaf):
        # Array
        reveal_type(self.rest * leaf.last + self.p)
        # error
        leaf.lats = g
        # error
        return self.rets * g
