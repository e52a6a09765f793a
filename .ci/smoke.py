"""Trains a line for a few steps with the installed package, not with the source tree."""

import importlib.metadata
import importlib.resources
import sys

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

package = importlib.resources.files("slalom")
assert "site-packages" in str(package), package
assert (package / "py.typed").is_file()

model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (64, 2))
y = x.sum(axis=1, keepdims=True)


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


opt = sl.Optimizer(sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1), model)
step = sl.train_step(loss_fn)
losses = []
for _ in range(100):
    model, opt, loss = step(model, opt, x, y)
    losses.append(float(loss))
assert losses[-1] < 0.01 * losses[0], losses
optional = {"matplotlib", "optax", "rich", "beartype", "safetensors", "torch"} & set(sys.modules)
assert not optional, optional
print(f"slalom {importlib.metadata.version('slalom')}: {losses[0]:.3g} -> {losses[-1]:.3g}")
