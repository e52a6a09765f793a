"""The training step that the tools run."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ...tree.types import PyTree, Scalar
from ..binding.optimizer import Optimizer
from ..training.options import check_model_state
from ..training.train_step import train_step


class Run(NamedTuple):
    """The values that a training step carries."""

    model: PyTree
    opt: Optimizer
    model_state: PyTree


def step_of_runs(
    loss_fn: Callable[..., Any], model_state: PyTree, **options: Any
) -> Callable[[Run, tuple[Any, ...]], tuple[Run, Scalar]]:
    """A training step from a run and a batch to the run and the loss.

    **Arguments:**

    - `loss_fn`, `options`: as for `sl.train_step`.
    - `model_state`: the state of the model, if it has one. The loss then takes it after the model,
        and returns the new one in the place of `aux`.
    """
    has_state = model_state is not None
    if has_state:
        check_model_state(options["microbatches"], model_state)
        options["has_aux"] = True
    step: Any = train_step(loss_fn, **options)

    def advance(run: Run, batch: tuple[Any, ...]) -> tuple[Run, Scalar]:
        states = (run.model_state,) if has_state else ()
        model, opt, returned = step(run.model, run.opt, *states, *batch)
        loss = returned[0] if options["has_aux"] or options["has_weight"] else returned
        return Run(model, opt, returned[-1] if has_state else None), loss

    return advance
