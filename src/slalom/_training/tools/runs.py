"""The training step that the tools run."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..._binding.optimizer import Optimizer
from ...tree.types import PyTree, Scalar
from ..train_step import BatchArgs, train_step


class Run(NamedTuple):
    """What a training step carries."""

    model: PyTree
    opt: Optimizer
    model_state: PyTree


class LossOptions(NamedTuple):
    """The options of `sl.train_step` for the losses of the tools."""

    has_aux: bool
    has_weight: bool
    microbatches: int | None
    batch_args: BatchArgs

    def make_step(
        self, loss_fn: Callable[..., Any], donate: Any, has_state: bool
    ) -> Callable[[Run, tuple[Any, ...]], tuple[Run, Scalar]]:
        """A training step from a run and a batch to the run and the loss.

        With `has_state`, the loss takes the state of the model after it, and returns the new one in
        the place of `aux`.
        """
        has_aux = self.has_aux or has_state
        if has_state and self.microbatches is not None:
            raise ValueError(
                "`model_state` cannot be combined with `microbatches`: every microbatch would "
                "start from the same state. Leave out one of them."
            )
        step: Any = train_step(
            loss_fn,
            has_aux=has_aux,
            has_weight=self.has_weight,
            donate=donate,
            microbatches=self.microbatches,
            batch_args=self.batch_args,
        )

        def advance(run: Run, batch: tuple[Any, ...]) -> tuple[Run, Scalar]:
            states = (run.model_state,) if has_state else ()
            model, opt, returned = step(run.model, run.opt, *states, *batch)
            loss = returned[0] if has_aux or self.has_weight else returned
            return Run(model, opt, returned[-1] if has_state else None), loss

        return advance
