"""Draws the memory of codecs and of state on several devices, as `sl.plan` computes it."""

import jax
import jax.numpy as jnp
from bars import figure
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import slalom as sl

CODECS = [None, "bfloat16", "float16", "int8", "float8_e4m3fn", "dynamic8", "int4"]
CODECS_PLACE, DEVICES_PLACE = "<!-- memory of codecs -->", "<!-- state on devices -->"
DEVICES = 8
PARTS = ("parameters", "gradients", "state")


def codecs():
    """The bytes of AdamW's state for each parameter, by codec."""
    mesh = AbstractMesh((1,), ("data",))
    model = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    rows = []
    for codec in CODECS:
        tx = sl.adamw(1e-3) if codec is None else sl.adamw(1e-3).store(codec)
        size = sl.plan(tx, model, mesh).state / model["w"].size
        name = "sl.adamw(1e-3)" if codec is None else f'.store("{codec}")'
        rows.append((name, [(f"{size:.2f}", [(0, size)])]))
    return figure(rows, "Bytes of AdamW's state for each parameter")


def devices():
    """The memory of a model of 6.7 billion parameters on each of eight devices."""
    mesh = AbstractMesh((DEVICES,), ("data",))

    def model(spec):
        home = NamedSharding(mesh, spec)
        return [jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16, sharding=home)] * 100

    adamw = sl.adamw(1e-3)
    plans = {
        "P()": sl.plan(adamw, model(P()), mesh),
        'P(), shard_state("data")': sl.plan(adamw, model(P()), mesh, shard_state="data"),
        'P("data")': sl.plan(adamw, model(P("data")), mesh),
        'P("data"), .store("int8")': sl.plan(adamw.store("int8"), model(P("data")), mesh),
    }
    rows = []
    for name, plan in plans.items():
        sizes = [(i, x / 1e9) for i, x in enumerate((plan.params, plan.grads, plan.state))]
        rows.append((name, [(f"{sum(size for _, size in sizes):.1f}", sizes)]))
    return figure(rows, f"GB on each of {DEVICES} devices, in bfloat16, with AdamW", PARTS)
