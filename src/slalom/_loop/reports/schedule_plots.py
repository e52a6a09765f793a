"""A figure of the schedules of an optimizer."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ..._core.fields.schedule import AbstractSchedule, AbstractStatefulSchedule
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.walk import parts
from ..._core.text.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_schedules(
    transform: AbstractTransform[Any], state: Any, count: Any, steps: int
) -> "Figure":
    """Draws each schedule of a transform over its first steps."""
    if jnp.ndim(count):
        raise ValueError(
            f"This optimizer was created under `vmap` and holds {count.shape[0]} runs. Plot one of "
            "them: `jax.tree.map(lambda leaf: leaf[0], opt).plot_schedules(steps)`."
        )
    held = list(_schedules(transform, state, count))
    if not held:
        raise ValueError(
            "There is nothing to plot: this optimizer has no schedules. Pass one in place of a "
            "number, such as `sl.adam(sl.schedules.cosine_decay(1e-3, decay_steps=1000))`."
        )
    size = (6.4, 1.0 + 2.2 * len(held))
    figure, grid = make_figure("opt.plot_schedules", len(held), size=size, share_x=True)
    for axes, (path, schedule, step) in zip(grid, held, strict=True):
        axes.plot(np.arange(steps), np.asarray(schedule.values(steps)))
        axes.set_title(path, loc="left", fontsize="medium")
        if 0 < (now := int(step)) < steps:
            axes.axvline(now, color="gray", linestyle="--", linewidth=1, label="next step")
    grid[-1].set_xlabel("step")
    return figure


def _schedules(
    transform: AbstractTransform[Any], state: Any, count: Any
) -> Iterator[tuple[str, AbstractSchedule, Any]]:
    """The path of each schedule, the schedule, and the step on its clock. One with state is
    refused."""
    clocks = {part.name: part.context.step for part in parts(transform, state, Context(step=count))}
    for part in parts(transform):
        for field in dataclasses.fields(part.module):
            value = getattr(part.module, field.name)
            many = value if isinstance(value, tuple) else (value,)
            path = ".".join((*part.path, field.name))
            for i, one in enumerate(many):
                if isinstance(one, AbstractStatefulSchedule):
                    raise ValueError(
                        f"'{path}' is driven by {one!r}, whose values depend on the losses of the "
                        "run. Record them with `tx.record()`, and plot `opt.metrics` with "
                        "`sl.plot_metrics(history)`. `schedule.plot(steps)` plots a schedule "
                        "without state."
                    )
                if isinstance(one, AbstractSchedule):
                    name = f"{path}.{i}" if many is value else path
                    yield name, one, clocks.get(part.name, jnp.zeros((), jnp.int32))
