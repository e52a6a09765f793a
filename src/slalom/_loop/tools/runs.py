"""The runs of the tools: batches, training steps, progress, and reports from compiled loops.

A program knows the function that receives its reports by a number, which is one of its arguments.
So another function does not compile the program again, and the program keeps none alive.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._core.protocol.transform import AbstractTransform
from ...tree.types import PyTree, Scalar, Tracer, WhereLike
from ..binding.binding import no_transform
from ..binding.optimizer import Optimizer
from ..training.loss import check_call
from ..training.options import check_model_state
from ..training.train_step import train_step


def bound(who: str, loss_fn: Any, tx: Any, model: PyTree, trainable: WhereLike | None) -> Optimizer:
    """The optimizer of a tool, from its arguments. `who` is the public function, for messages."""
    if not isinstance(tx, AbstractTransform):
        at, call = f"second argument of `{who}`", f"{who}(loss_fn, tx, model, ...)"
        raise TypeError(no_transform(tx, [loss_fn, model], at, call))
    return Optimizer(tx, model, trainable=trainable)


def refuse_trace(who: str, *inputs: PyTree) -> None:
    """Raises an error inside a `jit`, `vmap` or `grad`, where no loss has a value."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((jnp.zeros(()), inputs))):
        raise TypeError(
            f"`{who}` reads losses on the host, so it does not work under `jit`, `vmap` or `grad`. "
            "Call it outside. `step.scan` and `sl.minimize` work inside."
        )


def take(batches: Iterable[Any], steps: int, who: str) -> Iterator[tuple[Any, ...]]:
    """The arguments of the loss after the model, for each step.

    **Arguments:**

    - `batches`: tuples or lists of arguments, or single arguments. They are repeated if there are
        too few, unless they come from an iterator, which can be read only once.
    - `steps`: the number of steps.
    - `who`: the public function, for messages.
    """
    taken, source = 0, batches_of(batches, who)
    while taken < steps:
        before = taken
        for batch in source:
            refuse_trace(who, batch)
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            taken += 1
            if taken == steps:
                return
        source = batches_of(batches, who)
        if taken == before or source is batches:
            raise ValueError(
                f"`{who}` got {taken} batches for {steps} steps. Pass `steps={taken}`, or a list "
                "or a data loader, which can be read several times."
                if taken
                else f"`{who}` got no batches. Pass tuples of the arguments of the loss after the "
                "model, such as `[(x, y)]`."
            )


def batches_of(batches: Any, who: str) -> Iterator[Any]:
    """An iterator over the batches."""
    # The most likely mistake: one batch instead of many. Its rows would be taken for batches.
    is_one = isinstance(batches, tuple) and any(hasattr(x, "shape") for x in batches)
    if is_one or hasattr(batches, "shape") or not isinstance(batches, Iterable):
        raise TypeError(
            f"`{who}` takes an iterable of batches, got {_kind(batches)}. To use one batch in "
            "every step, pass a list with it: `[(x, y)]`."
        )
    return iter(batches)


def _kind(batches: Any) -> str:
    if isinstance(batches, tuple):
        return f"a tuple of {len(batches)}, which looks like a single batch"
    if hasattr(batches, "shape"):
        return "an array"
    return f"an object of type {type(batches).__name__}"


class Run(NamedTuple):
    """The values that a training step carries."""

    model: PyTree
    opt: Optimizer
    model_state: PyTree


def step_of_runs(
    who: str, loss_fn: Callable[..., Any], model_state: PyTree, **options: Any
) -> Callable[[Run, tuple[Any, ...]], tuple[Run, Scalar]]:
    """A training step from a run and a batch to the run and the loss.

    **Arguments:**

    - `who`: the public function, for messages.
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
        check_call(loss_fn, (*states, *batch), {}, who, before=1 + len(states))
        model, opt, returned = step(run.model, run.opt, *states, *batch)
        loss = returned[0] if options["has_aux"] or options["has_weight"] else returned
        return Run(model, opt, returned[-1] if has_state else None), loss

    return advance


def shows_progress(progress: bool | None) -> bool:
    """Whether to show a progress bar. `None` shows it in a terminal."""
    return sys.stderr.isatty() if progress is None else progress


@contextlib.contextmanager
def progress_bar(
    total: int, progress: bool | None, description: str
) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar. Yields a function that sets a note and advances by a number of steps.

    **Arguments:**

    - `total`: the number of steps.
    - `progress`: whether to show it. `None` shows it in a terminal, if tqdm is installed.
    - `description`: what is in progress.
    """
    if not shows_progress(progress):
        yield lambda note, steps: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress:
            raise ImportError("`progress=True` needs tqdm: pip install tqdm.") from error
        yield lambda note, steps: None
        return
    with tqdm(total=total, desc=description, unit="step") as bar:

        def advance(note: str, steps: int) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(steps)

        yield advance


_numbers = itertools.count()
_receivers: dict[int, Callable[..., None]] = {}


@contextlib.contextmanager
def receiver(function: Callable[..., None]) -> Iterator[Array]:
    """Lets a function receive the values that programs in this context send. Yields its number.

    An exception of the function ends the program, and leaves the context as it was raised.
    """
    errors: list[BaseException] = []

    def receive(*values: Any) -> None:
        if errors:
            return  # the program is about to end
        try:
            function(*values)
        except BaseException as error:
            errors.append(error)
            raise

    number = next(_numbers)
    _receivers[number] = receive
    try:
        yield jnp.asarray(number, jnp.int32)
        jax.effects_barrier()
    except Exception:
        if not errors:
            raise
    finally:
        del _receivers[number]
    if errors:  # JAX has made another error of it, which shows its text only
        raise errors[0] from None


def send(number: Array, *values: Array) -> None:
    """Calls the function with this number, if its context is still open."""
    jax.debug.callback(_receive, number, *values)


def _receive(number: Any, *values: Any) -> None:
    receive = _receivers.get(int(number))
    if receive is not None:
        receive(*values)
