"""Several runs with different hyperparameters as one program."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Real

from ..._core.fields.hyperparams import all_targets, targets
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.transform import AbstractTransform
from ..._core.text import notebook
from ..._core.text.calls import advise_positions
from ..._core.text.figures import make_figure
from ..._core.text.messages import check_int
from ...tree.paths import candidates
from ...tree.types import PyTree, WhereLike
from ..binding.model import split
from ..binding.optimizer import Optimizer
from ..programs.arguments import Carried
from ..programs.program import Program
from ..reports.plots import draw_final_losses, draw_heat_map, draw_sweep_losses
from ..training.options import BatchArgs
from .runs import Run, bound, progress_bar, refuse_trace, step_of_runs, take

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_ROWS = 20
"""The number of runs that a notebook lists."""


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """The losses of a sweep, as `sl.sweep` returns them.

    **Arguments:**

    - `grid`: the values of each hyperparameter, by the name that was passed.
    - `losses`: the loss of each run in each step, before its update. The axes follow `grid`, in
        order, and the steps.
    """

    grid: dict[str, Real[np.ndarray, " values"]]
    losses: Float[np.ndarray, "*grid steps"]

    @property
    def final(self) -> Float[np.ndarray, "*grid"]:
        """The mean of the last losses of each run, over a tenth of all steps."""
        last = max(1, self.losses.shape[-1] // 10)
        return self.losses[..., -last:].mean(axis=-1)

    @property
    def best_index(self) -> tuple[int, ...]:
        """The position in the grid of the run with the lowest final loss.

        A run whose final loss is not finite never wins. If there is no other, this raises a
        `ValueError`.
        """
        final = self.final
        if not np.isfinite(final).any():
            raise ValueError(
                "No run of this sweep has a finite final loss. Sweep smaller learning rates, or "
                "clip the gradients with `sl.ClipByGlobalNorm(1.0)`."
            )
        lowest = np.argmin(np.where(np.isfinite(final), final, np.inf))
        return tuple(int(i) for i in np.unravel_index(lowest, final.shape))

    @property
    def best(self) -> dict[str, Any]:
        """The hyperparameters of the run with the lowest final loss, as Python numbers.

        `opt.with_hyperparams(result.best)` sets them.
        """
        pairs = zip(self.grid.items(), self.best_index, strict=True)
        return {name: values[i].item() for (name, values), i in pairs}

    def plot(self) -> "Figure":
        """Plots the loss of each run, and the final losses over the grid, with matplotlib.

        The colors of the losses show the first hyperparameter. The final losses are a line for one
        hyperparameter, and a heat map of the first two otherwise, of the best values of the others.

        **Returns:** a `matplotlib.figure.Figure`. `.savefig(path)` saves it, and a notebook shows
        it.

        **Raises:** `ImportError` without matplotlib.
        """
        figure, (left, right) = make_figure("SweepResult.plot", columns=2, size=(10.5, 4.0))
        draw_sweep_losses(left, self)
        if len(self.grid) == 1:
            draw_final_losses(right, self)
        else:
            draw_heat_map(figure, right, self)
        return figure

    def __repr__(self) -> str:
        *runs, steps = self.losses.shape
        axes = ", ".join(f"{name}: {n}" for name, n in zip(self.grid, runs, strict=True))
        text = f"sweep of {np.prod(runs)} runs ({axes}) with {steps} steps"
        if not np.isfinite(self.final).any():
            return f"{text}, none with a finite loss"
        best = ", ".join(f"{name}={value:.4g}" for name, value in self.best.items())
        return f"{text}, best: {best} with loss {self.final[self.best_index]:.4g}"

    def _repr_html_(self) -> str:
        final = self.final
        best_first = np.argsort(np.where(np.isfinite(final), final, np.inf), axis=None)
        rows = []
        for run in best_first[:MOST_ROWS]:
            index = np.unravel_index(run, final.shape)
            pairs = zip(self.grid.values(), index, strict=True)
            rows.append([*(f"{values[i]:.4g}" for values, i in pairs), f"{final[index]:.4g}"])
        header = [*self.grid, "final loss"]
        return notebook.document(notebook.table(header, rows, repr(self), header))


IN_FLIGHT = 8
"""The number of steps that are dispatched before the loss of the first one is waited for. Without a
limit, the batches of all steps could be in memory at once."""


@advise_positions("Write `sl.sweep(loss_fn, tx, model, batches, grid, steps=100)`.")
def sweep(
    loss_fn: Callable[..., Any],
    tx: AbstractTransform[Any],
    model: PyTree,
    batches: Iterable[Any],
    grid: Mapping[str, Sequence[int | float] | Real[Array | np.ndarray, " values"]],
    *,
    steps: int,
    chunk: int | None = None,
    trainable: WhereLike | None = None,
    model_state: PyTree = None,
    has_aux: bool = False,
    has_weight: bool = False,
    microbatches: int | None = None,
    batch_args: BatchArgs = None,
    progress: bool | None = None,
) -> SweepResult:
    """Trains one run for each point of a grid of hyperparameters, all at once.

    All runs start from the same model and see the same batches. The training step is vectorized
    over the runs with `jax.vmap`, so it is compiled once, and each step is one call.

    ```python
    >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (32, 2))
    >>> def loss_fn(model, x, y):
    ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
    >>> grid = {"learning_rate": [1e-5, 1e-2], "weight_decay": [0.0, 0.1, 1.0]}
    >>> found = sl.sweep(loss_fn, sl.adamw(1e-3), model, [(x, x[:, :1])], grid, steps=20)
    >>> found.losses.shape
    (2, 3, 20)
    >>> found.best["learning_rate"]
    0.01

    ```

    **Arguments:**

    - `loss_fn`: the loss, as for `sl.train_step`.
    - `tx`: the transform.
    - `model`: the model that all runs start from. It is not changed.
    - `batches`: an iterable of batches, each a tuple or list of the arguments of the loss after the
        model. It is read once. Batches are repeated if there are fewer than `steps`, unless they
        come from an iterator.
    - `grid`: the values of each hyperparameter, by its path, an unambiguous suffix of it, or a
        glob. The numbers of a schedule can be swept too: `"learning_rate.peak_value"`.
    - `steps`: the number of steps of each run, an int ≥ 1.
    - `chunk`: how many runs are trained at the same time, an int ≥ 1. Each takes the memory of its
        parameters, state and activations. Chunks run one after the other, with the same program.
        Defaults to all runs, or to as many as fit if the device runs out of memory.
    - `trainable`: which arrays to train, as in `Optimizer`.
    - `model_state`: the state of the model, such as an `eqx.nn.State`. The loss is then called as
        `loss_fn(model, model_state, *batch)`, and returns the new state as its `aux`.
    - `has_aux`, `has_weight`, `microbatches`, `batch_args`: as for `train_step`.
    - `progress`: whether to show a progress bar, with tqdm. Defaults to whether the error stream is
        a terminal.

    **Returns:** the losses, with an axis for each hyperparameter and one for the steps, and with
    `.final`, `.best` and `.plot()`.

    **Raises:** `KeyError` for a hyperparameter that does not exist or is ambiguous; `ValueError`
    for an invalid value, or too few batches.
    """
    check_int("`steps` of `sl.sweep`", steps, 1)
    if chunk is not None:
        check_int("`chunk` of `sl.sweep`", chunk, 1, ", the number of runs at a time")
    refuse_trace("sl.sweep", tx, model, grid)
    base = bound("sl.sweep", loss_fn, tx, model, trainable)
    axes = _checked(grid, base)
    advance = step_of_runs(
        "sl.sweep",
        loss_fn,
        model_state,
        has_aux=has_aux,
        has_weight=has_weight,
        microbatches=microbatches,
        batch_args=batch_args,
        donate=False,
    )
    runs = _Runs(Run(model, base, model_state), advance)
    points = np.meshgrid(*axes.values(), indexing="ij")
    values = {name: point.ravel() for name, point in zip(axes, points, strict=True)}
    total = points[0].size
    losses = np.empty((total, steps))
    source = _Replayed(take(batches, steps, "sl.sweep"))

    size, done = _even(total, total if chunk is None else chunk), 0
    with progress_bar(total * steps, progress, f"sweep of {total} runs") as bar:
        while done < total:
            # The last chunk repeats a run where it would be smaller, which would compile again.
            rows = np.minimum(np.arange(done, done + size), total - 1)
            new = min(size, total - done)

            def note(lowest: float, new: int = new, more: bool = size < total) -> None:
                source.keeps = more  # the first step has shown that the memory suffices
                bar(f"lowest loss {lowest:.4g}", new)

            try:
                new_losses = runs.train({k: v[rows] for k, v in values.items()}, source, note)
            except jax.errors.JaxRuntimeError as error:
                no_memory = "RESOURCE_EXHAUSTED" in str(error)
                if chunk is not None or size == 1 or not no_memory or not source.keeps:
                    raise
                size = _even(total - done, math.ceil(size / 2))
                continue
            losses[done : done + new] = new_losses[:new]
            done += size
    shape = tuple(len(axis) for axis in axes.values())
    return SweepResult(axes, losses.reshape(*shape, steps))


class SweepInputs(NamedTuple):
    """The inputs of the program of one step of all runs."""

    batch: tuple[Any, ...]
    fixed: Run
    """The values that all runs share, with `None` elsewhere."""
    varying: Run
    """The values that differ between runs, stacked, with `None` elsewhere."""


class _Runs:
    """Runs that differ in some hyperparameters, stacked along the first axis of their arrays."""

    def __init__(self, start: Run, advance: Callable[[Run, tuple[Any, ...]], tuple[Run, Array]]):
        # Arrays that no step changes are not repeated for each run.
        self._varies = varies = Run(
            split(start.model, start.opt.binding.trainable).flags,
            jax.tree.map(lambda _: True, start.opt),
            jax.tree.map(eqx.is_array, start.model_state),
        )
        self._start = start
        self._fixed = eqx.filter(start, varies, inverse=True)

        def sweep_step(inputs: SweepInputs) -> tuple[list[Array], Float[Array, " runs"]]:
            def one(varying: Run) -> tuple[list[Array], Array]:
                run, loss = advance(eqx.combine(varying, inputs.fixed), inputs.batch)
                return jax.tree.leaves(eqx.filter(run, varies)), loss

            return jax.vmap(one)(inputs.varying)

        def carried(inputs: SweepInputs, at: SweepInputs) -> Carried:
            return dict.fromkeys(jax.tree.leaves(at.varying))

        self._program = Program(sweep_step, carried, donated=carried)

    def train(
        self,
        values: Mapping[str, np.ndarray],
        batches: Iterable[tuple[Any, ...]],
        note: Callable[[float], None],
    ) -> Float[np.ndarray, "runs steps"]:
        """The losses of runs with these hyperparameters."""

        def start(values: Mapping[str, Array]) -> Run:
            opt = self._start.opt.with_hyperparams(values)
            # Some numbers set the initial state, such as the first step of D-Adaptation.
            begun = opt.reset(self._start.model)
            opt = opt._with_arrays(begun.arrays)
            return eqx.filter(self._start._replace(opt=opt), self._varies)

        varying = jax.vmap(start)({name: jax.numpy.asarray(v) for name, v in values.items()})
        losses: list[Any] = []
        waiting: deque[Array] = deque()

        def collect() -> None:
            losses.append(np.asarray(waiting.popleft(), np.float64))
            note(float(np.min(losses[-1], initial=np.inf, where=np.isfinite(losses[-1]))))

        for batch in batches:
            after, loss = self._program(SweepInputs(batch, self._fixed, varying))
            varying = after.varying
            waiting.append(loss)
            # Errors of the first step must come before the second one takes its donated arrays.
            if len(waiting) > IN_FLIGHT or not losses:
                collect()
        while waiting:
            collect()
        return np.stack(losses, axis=1)


class _Replayed:
    """Batches that are read once, and can be iterated again as long as they are kept."""

    def __init__(self, source: Iterator[tuple[Any, ...]]):
        self._source = source
        self._seen: list[tuple[Any, ...]] = []
        self.keeps = True

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from self._seen
        for batch in self._source:
            if self.keeps:
                self._seen.append(batch)
            yield batch


def _even(total: int, chunk: int) -> int:
    """The size of equal chunks of at most this size."""
    return math.ceil(total / math.ceil(total / chunk))


def _checked(grid: Any, base: Optimizer) -> dict[str, np.ndarray]:
    """The values of each hyperparameter. Raises an error for those that the optimizer refuses."""
    if not isinstance(grid, Mapping):
        raise TypeError(
            "`grid` must be a dict from hyperparameters to their values, such as "
            f"{{'learning_rate': [1e-4, 1e-3]}}, got {grid!r}."
        )
    if not grid:
        raise ValueError("`grid` is empty. Write `grid={'learning_rate': [1e-4, 1e-3]}`.")
    axes, owner = {}, {}
    for name, values in grid.items():
        axes[name] = _axis(name, values)
        for path, (part, field) in targets(base.transform, name).items():
            if path in owner:
                raise ValueError(
                    f"`grid` contains '{path}' twice: as '{owner[path]}' and as '{name}'. Remove "
                    "one of them."
                )
            owner[path] = name
            held = getattr(part.module, field.name)
            if isinstance(held, AbstractSchedule):
                numbers = [p for p in all_targets(base.transform) if p.startswith(f"{path}.")]
                advice = (
                    f" Sweep one of its numbers: {candidates(name, numbers)}."
                    if numbers
                    else " Replace it by a number, or by a schedule from `sl.schedules`."
                )
                raise ValueError(f"'{path}' in `grid` is the schedule {held!r}.{advice}")
        for value in axes[name]:
            base.with_hyperparams({name: value.item()})
    return axes


def _axis(name: str, values: Any) -> np.ndarray:
    try:
        axis = np.asarray(values)
        numbers = axis.dtype.kind in "iuf"
    except ValueError:  # lists of different lengths
        axis, numbers = np.zeros(()), False
    if not numbers or axis.ndim != 1 or axis.size == 0:
        raise ValueError(
            f"`grid[{name!r}]` must be a list of numbers, such as [1e-4, 1e-3], got {values!r}."
        )
    return axis
