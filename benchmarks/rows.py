"""The optimizers to benchmark, as users of each library write them, and their targets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax import contrib

import slalom as sl


class Row(NamedTuple):
    """One optimizer in several libraries."""

    slalom: Callable[[], sl.AbstractTransform]
    optax: Callable[[], Any]
    limit: float
    """The minimum number of bytes to move per parameter and step in float32, averaged over a
    window: every array is read and written once, or twice if a value depends on all of it."""
    target: float
    """The target for the time of Optax divided by ours."""
    torch: str = ""
    """The class in `torch.optim`, if any."""
    window: int = 1
    """The number of steps to average over."""
    idle_limit: float = 0.0
    """The minimum for the steps of a window before the last, if they are idle."""
    idle_target: float = 0.0
    scratch: float = 0.01
    """The target for scratch memory, as a fraction of the parameters."""
    loss: Callable[[Any], Any] | None = None
    """The loss, for rules that differentiate it themselves."""


def _schedule(library: Any) -> Any:
    name = "warmup_cosine_decay_schedule" if library is optax else "warmup_cosine_decay"
    return getattr(library, name)(0.0, 1e-3, warmup_steps=100, decay_steps=10_000)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "rest", params)


def _optax_clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def _quadratic(params: Any) -> Any:
    return sum(jnp.sum(0.005 * p**2 + 0.001 * p) for p in jax.tree.leaves(params))


ROWS: Mapping[str, Row] = {
    "AdamW": Row(lambda: sl.adamw(1e-3), lambda: optax.adamw(1e-3), 28, 0.97, "AdamW"),
    "clip, AdamW": Row(
        lambda: sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3),
        _optax_clipped,
        limit=32,
        target=1.8,
    ),
    "if finite(clip, AdamW)": Row(
        lambda: (sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)).if_finite(),
        lambda: optax.apply_if_finite(_optax_clipped(), max_consecutive_errors=5),
        limit=32,
        target=2.1,
    ),
    "AdamW every 4": Row(
        lambda: sl.adamw(1e-3).every_k(4),
        lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
        limit=(3 * 12 + 32) / 4,
        target=8,
        window=4,
        idle_limit=12,
        idle_target=14,
    ),
    "SGD, momentum": Row(
        lambda: sl.sgd(1e-3, momentum=0.9),
        lambda: optax.sgd(1e-3, momentum=0.9),
        limit=20,
        target=0.97,
        torch="SGD",
    ),
    "Lion": Row(lambda: sl.lion(1e-4), lambda: optax.lion(1e-4), limit=20, target=2.4),
    "AdEMAMix": Row(lambda: sl.ademamix(1e-3), lambda: contrib.ademamix(1e-3), 36, 0.97),
    "ADOPT": Row(lambda: sl.adopt(1e-3), lambda: contrib.adopt(1e-3), limit=28, target=1.1),
    "MADGRAD": Row(lambda: sl.contrib.madgrad(1e-3), lambda: contrib.madgrad(1e-3), 32, 0.97),
    # Every tenth step makes an estimate: it reads and writes one more array.
    "Sophia": Row(
        lambda: sl.contrib.sophia(1e-3),
        lambda: contrib.sophia(1e-3),
        limit=24 + 8 / 10,
        target=2,
        window=10,
        scratch=0.1,
        loss=_quadratic,
    ),
    "LAMB": Row(lambda: sl.lamb(1e-3), lambda: optax.lamb(1e-3), 40, 1.4, scratch=1.1),
    "Adafactor": Row(
        lambda: sl.adafactor(1e-3),
        lambda: optax.adafactor(1e-3),
        limit=24,
        target=2,
        scratch=0.1,
    ),
    "schedule-free AdamW": Row(
        lambda: sl.schedule_free_adamw(1e-3),
        lambda: optax.contrib.schedule_free_adamw(1e-3),
        limit=28,
        target=1.0,
        scratch=1.1,
    ),
    "Prodigy": Row(lambda: sl.prodigy(), lambda: optax.contrib.prodigy(), limit=48, target=0.97),
    "partition": Row(
        lambda: sl.adamw(1e-3).partition({sl.where.ndim(max=1): sl.adamw(1e-4)}),
        lambda: optax.partition({"matrix": optax.adamw(1e-3), "rest": optax.adamw(1e-4)}, _labels),
        limit=28,
        target=0.97,
    ),
    "mask": Row(
        lambda: sl.adamw(1e-3, weight_decay=0.1, decay_where=sl.where.ndim(min=2)),
        lambda: optax.adamw(1e-3, weight_decay=0.1, mask=_matrices),
        limit=28,
        target=0.97,
    ),
    "injected numbers": Row(
        lambda: sl.adamw(1e-3),
        lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
        limit=28,
        target=0.97,
    ),
    "scheduled": Row(
        lambda: sl.adamw(_schedule(sl.schedules)),
        lambda: optax.adamw(_schedule(optax)),
        limit=28,
        target=0.97,
    ),
    "flatten(AdamW)": Row(
        lambda: sl.adamw(1e-3).flatten(),
        lambda: optax.flatten(optax.adamw(1e-3)),
        limit=28,
        target=3,
        scratch=1.1,
    ),
}
