"""What a type checker infers of optimizers. Read by `tests/core/test_types.py`, never run.

The comment above a line is what the checker says of it.
"""

from typing import reveal_type

import equinox as eqx
import jax

import slalom as sl

model: eqx.nn.MLP = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
opt = sl.Optimizer(sl.adam(1e-3), model)

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
