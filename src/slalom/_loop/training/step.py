"""The object that `train_step` returns, and its compiled programs."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

import jax
from jaxtyping import Array

from ..._core.protocol.transform import AbstractTransform
from ..._core.text.calls import advise_positions
from ...tree.types import PyTree, Tracer, is_deleted
from ..binding.model import Model
from ..binding.optimizer import Optimizer
from ..binding.stepping import FUNCTIONS, as_keywords, check_can_step, check_one_run
from ..programs.arguments import Carried, as_tree, carried
from ..programs.interrupts import HeldSignals
from ..programs.program import Program
from .batch import TrainingInputs
from .gradient import train_step
from .options import Options
from .scan import check_guarded, check_scan, scan_steps

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


def _donated(inputs: TrainingInputs, at: TrainingInputs) -> Carried:
    """The leaves whose memory a training step reuses."""
    donate = inputs.options.donate
    return {} if donate is False else carried(inputs, at, params=donate == "all")


class TrainStep(Generic[P, R]):
    """A compiled training step, as `sl.train_step` returns it.

    `P` are the parameters of the loss after the model, and `R` is the third result of the step.
    """

    _program = Program(train_step, carried, donated=_donated, watched="sl.train_step")
    _scan_program = Program(scan_steps, carried, donated=_donated, watched="sl.train_step")

    last: tuple[Any, ...] | None
    """The results of the last call that donated its optimizer, until the next call. If Ctrl-C, or
    another signal whose handler raises, comes before they are assigned, they are here. Set it to
    `None` to free their memory."""

    def __init__(self, loss_fn: Callable[..., Any], options: Options):
        self.last = None
        self.loss_fn = loss_fn
        self.options = options
        self._loss = as_tree(loss_fn)

    if TYPE_CHECKING:
        # A `ParamSpec` allows no keyword such as `context` between its `args` and `kwargs`.
        @overload
        def __call__(
            self, model: Model, opt: Optimizer, /, *args: P.args, **kwargs: P.kwargs
        ) -> tuple[Model, Optimizer, R]: ...
        @overload
        def __call__(
            self,
            model: Model,
            opt: Optimizer,
            /,
            *args: Any,
            context: Mapping[str, Any] | None,
            **kwargs: Any,
        ) -> tuple[Model, Optimizer, R]: ...

    @advise_positions("Write `model, opt, loss = step(model, opt, x, y)`.", "step")
    def __call__(
        self,
        model: PyTree,
        opt: Any,
        /,
        *args: Any,
        context: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[PyTree, Optimizer, Any]:
        return self._results(self._program, self._inputs(model, opt, args, kwargs, context))

    def lower(
        self,
        model: PyTree,
        opt: Any,
        /,
        *args: Any,
        context: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(...).lower(...)` returns it, for inspection."""
        return self._program.lower(self._inputs(model, opt, args, kwargs, context))

    @overload
    def scan(
        self,
        model: Model,
        opt: Optimizer,
        /,
        *batches: Any,
        length: int | None = None,
        unroll: int = 1,
        model_state: PyTree = None,
        with_metrics: Literal[False] = False,
        context: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> tuple[Model, Optimizer, Any]: ...
    @overload
    def scan(
        self,
        model: Model,
        opt: Optimizer,
        /,
        *batches: Any,
        length: int | None = None,
        unroll: int = 1,
        model_state: PyTree = None,
        with_metrics: Literal[True],
        context: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> tuple[Model, Optimizer, Any, dict[str, Array]]: ...
    def scan(
        self,
        model: PyTree,
        opt: Optimizer,
        /,
        *batches: Any,
        length: int | None = None,
        unroll: int = 1,
        model_state: PyTree = None,
        with_metrics: bool = False,
        context: Mapping[str, Any] | None = None,
        **same: Any,
    ) -> Any:
        """Takes many steps in one compiled program, a `jax.lax.scan`.

        Python starts one program instead of one for each step, which matters for small models. The
        model may have functions inside. `opt` is donated as by a single step.

        ```python
        >>> @sl.train_step
        ... def step(model, x, y):
        ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
        >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> opt = sl.Optimizer(sl.adam(1e-3), model)
        >>> x, y = jnp.ones((100, 4, 2)), jnp.zeros((100, 4, 1))
        >>> model, opt, losses = step.scan(model, opt, x, y)
        >>> losses.shape
        (100,)

        ```

        On a CPU, XLA compiles convolutions inside a scan to slow code. There a loop over `step`
        is faster, or a scan with `unroll=10`.

        **Arguments:**

        - `model`, `opt`: as for a single step.
        - `batches`: the arguments of the loss after the model, where all arrays have a leading axis
            of steps.
        - `length`: the number of steps, an int ≥ 0. Only needed if no array is passed by position.
        - `unroll`: the number of steps in one iteration of the compiled loop, an int ≥ 1.
        - `model_state`: the state of the model, such as an `eqx.nn.State`. The loss is then called
            as `loss_fn(model, model_state, *batch)`, and returns the new state as its `aux`, with
            `has_aux=True`.
        - `with_metrics`: whether to return `opt.metrics` after each step too.
        - `context`: what the transforms need, as for a single step, the same in every step.
        - `same`: other arguments of the loss, the same in every step.

        A single PRNG key among any of these is split into one for each step.

        **Returns:** `(model, opt, losses)`. The third result is that of a single step with a
        leading axis of steps. With `model_state`, the last state takes the place of `aux`. With
        `with_metrics`, a dict of stacked metrics by path follows.

        **Raises:** `ValueError` for different numbers of steps. If the optimizer limits the steps
        that are not finite, as `.if_finite(on_limit="raise")` does, a `FloatingPointError` after
        all steps, with what the scan returns in `error.results`.
        """
        scan = {"length": length, "unroll": unroll, "with_metrics": with_metrics}
        inputs = self._inputs(model, opt, batches, same, context)
        inputs = inputs._replace(model_state=model_state, scan=scan)
        check_scan(inputs)
        return self._results(self._scan_program, inputs)

    def _results(
        self, program: Program[TrainingInputs, Any], inputs: TrainingInputs
    ) -> tuple[Any, ...]:
        """The results of a call."""
        count = inputs.opt.arrays.count
        if not is_deleted(count):  # otherwise the caller has yet to fetch the results
            self.last = None
        with nullcontext() if self.options.donate is False else HeldSignals(inputs):
            after, (others, guarded) = program(inputs)
            results = (after.model, after.opt, *others)
            # Whatever the caller does next, a signal may come before the assignment. Under an
            # outer transformation nothing was donated, and tracers must not be kept.
            if is_deleted(count):
                self.last = results
        if guarded and not any(isinstance(x, Tracer) for x in jax.tree.leaves(guarded)):
            check_guarded(results[1], guarded, results)
        return results

    def _inputs(
        self,
        model: PyTree,
        opt: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Mapping[str, Any] | None,
    ) -> TrainingInputs:
        if not isinstance(opt, Optimizer):
            raise TypeError(_no_optimizer(model, opt))
        check_can_step(opt)
        check_one_run(opt.arrays.count, "step(model, opt, ...)")
        return TrainingInputs(
            args=args,
            context={} if context is None else self._keywords(context),
            kwargs=kwargs,
            loss=self._loss,
            model=model,
            opt=opt,
            options=self.options,
        )

    def _keywords(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the transforms that the caller passed."""
        if not isinstance(context, Mapping):
            raise TypeError(
                "`context` must be a dict of what the transforms need, such as `context={'key': "
                f"key}}`, got {type(context).__name__}. To pass an argument of this name to the "
                "loss, pass it by position."
            )
        provided = ["value", "grad", *FUNCTIONS] + ["weight"] * self.options.has_weight
        for name in provided:
            if name in context:
                raise TypeError(
                    f"The training step passes '{name}' itself. Remove it from `context`."
                )
        return as_keywords(context)

    def __reduce__(self) -> Any:
        # Programs are not pickled. They are compiled again where the step is loaded.
        return TrainStep, (self.loss_fn, self.options)

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        options, defaults = self.options._asdict(), Options()._asdict()
        changed = [f", {k}={v!r}" for k, v in options.items() if v != defaults[k]]
        return f"sl.train_step({name}{''.join(changed)})"


def _no_optimizer(model: Any, opt: Any) -> str:
    """The message for a training step that got no optimizer."""
    if isinstance(model, Optimizer):
        return (
            "The model and the optimizer are swapped: write `model, opt, loss = step(model, opt, "
            "...)`."
        )
    got = "an array" if isinstance(opt, jax.Array) else type(opt).__name__
    message = (
        "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, got "
        f"{got} in its place."
    )
    if isinstance(opt, AbstractTransform):
        return f"{message} Bind it to the model first: `opt = sl.Optimizer(tx, model)`."
    if isinstance(opt, tuple) and any(isinstance(part, Optimizer) for part in opt):
        return f"{message} `opt.rebind` returns a pair: write `opt, report = opt.rebind(model)`."
    if isinstance(opt, str):
        return (
            f"{message} `sl.checkpoint.load` returns a dict: write `loaded = sl.checkpoint.load("
            'path, model=model, opt=opt)` and `model, opt = loaded["model"], loaded["opt"]`.'
        )
    return f"{message} Create one before the loop: `opt = sl.Optimizer(tx, model)`."
