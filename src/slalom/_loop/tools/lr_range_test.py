"""The learning-rate range test."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ..._core.fields.declare import check_number
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.calls import advise_positions
from ..._core.text.figures import make_figure
from ..._core.text.messages import check_int
from ...tree.types import PyTree, WhereLike
from ..binding.optimizer import Optimizer
from ..training.options import BatchArgs
from .runs import Run, bound, progress_bar, refuse_trace, step_of_runs, take

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_STEPS = 10
"""Fewer losses are too few to smooth them."""


@dataclasses.dataclass(frozen=True, eq=False)
class LRRangeTestResult:
    """The losses of a learning-rate range test, as `sl.lr_range_test` returns them.

    **Arguments:**

    - `learning_rates`: the learning rate of each step that was taken.
    - `losses`: the loss of each step, before the update with that learning rate. The last ones may
        not be finite.
    - `diverged`: whether the test stopped early because the loss diverged.
    """

    learning_rates: Float[np.ndarray, " steps"]
    losses: Float[np.ndarray, " steps"]
    diverged: bool

    @property
    def smoothed(self) -> Float[np.ndarray, " steps"]:
        """The mean of the losses around each step, over a tenth of all steps."""
        half = _window(len(self.losses)) // 2
        around = (self.losses[max(i - half, 0) : i + half + 1] for i in range(len(self.losses)))
        means = np.array([np.mean(each) for each in around])
        return np.where(np.isfinite(means), means, np.nan)

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the loss decreases fastest.

        A straight line is fitted to the losses around each step, over a tenth of all steps, as a
        function of the logarithm of the learning rate. The suggestion is the learning rate in the
        middle of the line with the lowest slope, among those before the lowest smoothed loss.
        `None` if no line falls.
        """
        window, smoothed = _window(len(self.losses)), self.smoothed
        if not np.isfinite(smoothed).any():
            return None
        end = int(np.nanargmin(smoothed)) + 1
        slopes = {
            i + window // 2: _slope(self.losses[i : i + window]) for i in range(end - window + 1)
        }
        steepest = min(slopes, key=slopes.__getitem__, default=0)
        falls = steepest in slopes and slopes[steepest] < 0
        return float(self.learning_rates[steepest]) if falls else None

    def plot(self) -> "Figure":
        """Plots the losses over the learning rates with matplotlib.

        **Returns:** a `matplotlib.figure.Figure`. `.savefig(path)` saves it, and a notebook shows
        it.

        **Raises:** `ImportError` without matplotlib.
        """
        figure, (axes,) = make_figure("LRRangeTestResult.plot", size=(6.4, 4.0))
        axes.semilogx(self.learning_rates, self.losses, alpha=0.35, linewidth=1, label="each step")
        axes.semilogx(self.learning_rates, self.smoothed, color="tab:blue", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion: {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="tab:orange", linestyle="--", label=label)
        axes.set(xlabel="learning rate", ylabel="loss")
        if self.diverged and np.isfinite(self.smoothed).any():
            # The last losses would flatten everything else.
            shown = self.losses[: int(np.nanargmin(self.smoothed)) + 1]
            room = 0.1 * (shown.max() - shown.min())
            axes.set_ylim(shown.min() - room, shown.max() + room)
        axes.legend(frameon=False)
        return figure

    def __repr__(self) -> str:
        rates = f"{len(self.losses)} steps from {self.learning_rates[0]:.3g} to "
        rates += f"{self.learning_rates[-1]:.3g}"
        best = "no suggestion" if self.suggestion is None else f"suggestion {self.suggestion:.3g}"
        return f"learning-rate range test: {rates}{', diverged' * self.diverged}, {best}"


@advise_positions("Write `found = sl.lr_range_test(loss_fn, tx, model, batches)`.")
def lr_range_test(
    loss_fn: Callable[..., Any],
    tx: AbstractTransform[Any],
    model: PyTree,
    batches: Iterable[Any],
    *,
    lr_min: int | float = 1e-6,
    lr_max: int | float = 10.0,
    steps: int = 100,
    name: str = "learning_rate",
    trainable: WhereLike | None = None,
    model_state: PyTree = None,
    has_aux: bool = False,
    has_weight: bool = False,
    microbatches: int | None = None,
    batch_args: BatchArgs = None,
    stop_factor: int | float = 4.0,
    progress: bool | None = None,
) -> LRRangeTestResult:
    """Trains for a few steps while the learning rate grows, to find a good one.

    Step i of n uses the learning rate

        lr_min (lr_max / lr_min)^(i / (n − 1))

    At first it is too small to change the loss, then the loss decreases, and in the end it
    diverges. The suggestion is where the loss decreases fastest, which is a good first guess for a
    constant learning rate or the peak of a schedule. With L the mean of the last losses, a tenth of
    all steps, the test stops as soon as

        L − min L > (stop_factor − 1) max(|min L|, |L₀|)

    or a loss is not finite. The step is compiled once, and every loss is read before the next step.

    ```python
    >>> model = eqx.nn.MLP(2, 1, 16, 1, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (32, 2))
    >>> def loss_fn(model, x, y):
    ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
    >>> batches = [(x, jnp.sin(x[:, :1]))]
    >>> found = sl.lr_range_test(loss_fn, sl.adam(1e-3), model, batches, lr_min=1e-5, lr_max=10.0)
    >>> 1e-3 < found.suggestion < 1
    True

    ```

    **Arguments:**

    - `loss_fn`: the loss, as for `sl.train_step`.
    - `tx`: the transform. If its learning rate is a schedule, the test takes the place of the
        schedule.
    - `model`: the model to start from. It is not changed.
    - `batches`: an iterable of batches, each a tuple or list of the arguments of the loss after the
        model. They are repeated if there are fewer than `steps`, unless they come from an iterator.
    - `lr_min`, `lr_max`: the first and the last learning rate, 0 < `lr_min` < `lr_max`.
    - `steps`: the number of steps, an int ≥ 10.
    - `name`: the path of the learning rate, or any unambiguous suffix. A glob such as
        `"**.learning_rate"` sets all that it matches.
    - `trainable`: which arrays to train, as in `Optimizer`.
    - `model_state`: the state of the model, such as an `eqx.nn.State`. The loss is then called as
        `loss_fn(model, model_state, *batch)`, and returns the new state as its `aux`.
    - `has_aux`, `has_weight`, `microbatches`, `batch_args`: as for `train_step`.
    - `stop_factor`: how much the loss may grow before the test stops, > 1. `math.inf` stops only
        for losses that are not finite.
    - `progress`: whether to show a progress bar, with tqdm. Defaults to whether the error stream is
        a terminal.

    **Returns:** the learning rates and losses, with `.suggestion` and `.plot()`.

    **Raises:** `KeyError` for a learning rate that does not exist or is ambiguous; `ValueError`
    for an invalid range, or too few batches.

    ??? cite "Smith, [Cyclical Learning Rates](https://arxiv.org/abs/1506.01186), 2015"
    """
    refuse_trace("sl.lr_range_test", tx, model, lr_min, lr_max)
    check_int("`steps` of `sl.lr_range_test`", steps, LEAST_STEPS)
    lr_min, lr_max, stop_factor = (
        check_number(f"`{name}` of `sl.lr_range_test`", x, "[-inf, inf]")
        for name, x in (("lr_min", lr_min), ("lr_max", lr_max), ("stop_factor", stop_factor))
    )
    if not 0 < lr_min < lr_max < math.inf:
        raise ValueError(
            "`sl.lr_range_test` needs 0 < lr_min < lr_max, got "
            f"lr_min={lr_min!r} and lr_max={lr_max!r}."
        )
    if not stop_factor > 1:
        raise ValueError(f"`stop_factor` must be larger than 1, got {stop_factor!r}.")
    step = step_of_runs(
        "sl.lr_range_test",
        loss_fn,
        model_state,
        has_aux=has_aux,
        has_weight=has_weight,
        microbatches=microbatches,
        batch_args=batch_args,
    )
    run = Run(model, bound("sl.lr_range_test", loss_fn, tx, model, trainable), model_state)
    learning_rates = np.geomspace(lr_min, lr_max, steps)
    losses: list[float] = []
    diverged = False
    with progress_bar(steps, progress, "learning-rate range test") as advance:
        pairs = zip(learning_rates, take(batches, steps, "sl.lr_range_test"), strict=True)
        for learning_rate, batch in pairs:
            run = run._replace(opt=_with_learning_rate(run.opt, name, float(learning_rate)))
            run, loss = step(run, batch)
            losses.append(float(loss))
            advance(f"learning rate {learning_rate:.2g}, loss {losses[-1]:.4g}", 1)
            diverged = _has_diverged(losses, _window(steps), stop_factor)
            if diverged:
                break
    return LRRangeTestResult(learning_rates[: len(losses)], np.array(losses), diverged)


def _with_learning_rate(opt: Optimizer, name: str, value: float) -> Optimizer:
    try:
        return opt.with_hyperparams({name: value}, replace_schedules=True)
    except KeyError as error:
        raise KeyError(
            f"{error.args[0]} Pass the path of the learning rate as `name=`, or a glob such as "
            "`name='**.learning_rate'` to set several."
        ) from None


def _window(steps: int) -> int:
    """The number of losses in a mean: a tenth of all, an odd number."""
    return max(2 * (steps // 20) + 1, 3)


def _slope(losses: Float[np.ndarray, " steps"]) -> float:
    """The slope of a straight line through losses at equal distances, up to a factor."""
    return float(np.sum((np.arange(len(losses)) - (len(losses) - 1) / 2) * losses))


def _has_diverged(losses: list[float], window: int, stop_factor: float) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    if len(losses) < window:
        return False
    means = np.convolve(losses, np.ones(window) / window, mode="valid")
    scale = max(abs(means.min()), abs(means[0]))
    return bool(means[-1] - means.min() > (stop_factor - 1) * scale)
