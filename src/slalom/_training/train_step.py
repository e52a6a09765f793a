"""The training step: gradient, optimizer step and donation, compiled as one."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._compile.program import Program, pack, unpack
from .._core.chain import first_link
from .._core.context import Context
from .._core.per_example import AbstractPerExampleTransform, with_first_link
from .._core.transform import AbstractTransform
from .._core.walk import transforms
from .._optimizer.model import split, strong
from .._optimizer.optimizer import Optimizer, advance, carried, check_guards
from .._optimizer.step import as_known
from ..transforms.linesearch import recalled
from .batch import batch_of
from .loss import Evaluated, evaluated, gather, over_examples, over_microbatches

_programs: dict[tuple[int, int], tuple[Callable[[], Any], dict[Any, Program]]] = {}
"""What was compiled of each loss that lives, by its identity: losses that compare equal, such as
modules with 1 and with True, may differ."""


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool | Literal["weight"] = False,
    donate: bool = True,
    microbatches: int | None = None,
    batch_args: int | str | tuple[int | str, ...] | list[int | str] | None = None,
    reuse_linesearch: bool = False,
) -> "TrainStep":
    """Makes a compiled training step from a loss.

    ```python
    >>> def loss_fn(model, x, y):
    ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
    >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.adam(1e-3), model)
    >>> step = sl.train_step(loss_fn)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)), jnp.zeros((4, 1)))

    ```

    The step differentiates the trainable leaves only, conjugates complex gradients, and passes
    `value` and, to transforms that declare the need, `grad` and `value_fn`. It returns before
    the work is done. A loss that holds `eqx.error_if` is compiled by `eqx.filter_jit` instead,
    without donation, so that its error arrives as Equinox words it and the model survives.

    With `microbatches=m` the loss is differentiated on m parts of the batch, one after another,
    and their mean is taken in at least float32: the step is that of the whole batch, in the
    memory of a part of it and one accumulator. Part i holds the examples i, i + m, i + 2m, …, so
    that a batch which is sharded over devices stays where it lies. For parts that count unequally,
    because examples are padded, let the loss return a weighted mean and its total weight.

    ```python
    >>> def loss_fn(model, x, y, mask):
    ...     errors = (jax.vmap(model)(x) - y) ** 2
    ...     return jnp.sum(errors * mask) / jnp.maximum(jnp.sum(mask), 1), jnp.sum(mask)
    >>> step = sl.train_step(loss_fn, has_aux="weight", microbatches=2)
    >>> batch = jnp.ones((4, 2)), jnp.zeros((4, 1)), jnp.array([[1.0], [1.0], [1.0], [0.0]])
    >>> model, opt, (loss, weight) = step(model, opt, *batch)
    >>> float(weight)
    3.0

    ```

    Where the first link of the optimizer takes a gradient for each example, such as
    `sl.DifferentiallyPrivateAggregate`, the loss is differentiated for each by itself. It is called
    with batches of size 1, so that it is written as for any batch; the loss returned is the mean.
    With `microbatches` what that link sums is gathered from one part of the batch after another.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a real scalar, or with
        `has_aux` a pair of it and any tree.
    - `has_aux`: whether the loss returns something beside. With `"weight"` that is how much the
        batch counts, a real scalar ≥ 0 such as its number of tokens: the mean over microbatches
        is weighted by it, and the optimizer is told the total `weight`, by which `.every_k` weighs
        mini-batches.
    - `donate`: whether the step may use the memory of the trainable leaves and of the optimizer's
        state for its result. The model and optimizer that were passed cannot be used again then.
        Frozen leaves, hyperparameters, keys and the batch are never donated.
    - `microbatches`: in how many parts the batch is differentiated, an int ≥ 1; it divides the
        number of examples.
    - `batch_args`: which arguments hold the batch, by name or by position after `opt`: every
        array in them has the examples along its leading axis. All arguments without it.
    - `reuse_linesearch`: whether loss and gradient are those that the line search at the end of the step
        before left in its state; they are computed in the first step only. For a loss that is
        one function throughout (the same data in each step, nothing random), and a model that
        nothing but the step changes. Not with `has_aux`.

    **Returns:** `step(model, opt, *args, context=None, **kwargs)`, which returns
    `(model, opt, loss)`, or with `has_aux` `(model, opt, (loss, aux))`; over `microbatches`, or
    examples, the arrays of `aux` are stacked along new first axes, and of weights it is the total.
    Arrays are traced; anything else among the arguments is static, and another value of it
    compiles another program. `context`, a dict, holds what `opt.step` takes as keywords, for the
    transforms: `key`, `weight`, `per_param`, and what custom transforms declare under `needs`.
    """
    if not callable(loss_fn):
        raise TypeError(f"train_step takes a loss function, got {loss_fn!r}.")
    if has_aux not in (True, False, "weight"):
        raise TypeError(f'train_step.has_aux must be a bool or "weight", got {has_aux!r}.')
    if not isinstance(donate, bool):
        raise TypeError(f"train_step.donate must be True or False, got {donate!r}.")
    if microbatches is not None:
        if not isinstance(microbatches, int) or isinstance(microbatches, bool):
            raise TypeError(f"train_step.microbatches must be an int, got {microbatches!r}.")
        if microbatches < 1:
            raise ValueError(f"train_step.microbatches must be at least 1, got {microbatches}.")
    if batch_args is not None:
        batch_args = (batch_args,) if isinstance(batch_args, int | str) else tuple(batch_args)
    if reuse_linesearch and has_aux:
        raise ValueError(
            "With `reuse_linesearch=True` the loss is not computed at the model that is passed, so there is "
            "nothing to return beside it: drop `has_aux`."
        )
    return TrainStep(loss_fn, Options(has_aux, donate, microbatches, batch_args, reuse_linesearch))


class Options(NamedTuple):
    """What `train_step` was told beside the loss."""

    has_aux: bool | Literal["weight"]
    donate: bool
    microbatches: int | None
    batch_args: tuple[int | str, ...] | None
    reuse_linesearch: bool


class TrainStep:
    """What `train_step` returns."""

    def __init__(self, loss_fn: Callable[..., Any], options: Options):
        self.loss_fn = loss_fn
        self.options = options
        self._program = _program(loss_fn, options)

    def __call__(
        self,
        model: Any,
        opt: Optimizer,
        /,
        *args: Any,
        context: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        after, loss = self._program(self._arguments(model, opt, args, kwargs, context))
        return after["model"], after["opt"], loss

    def lower(
        self,
        model: Any,
        opt: Optimizer,
        /,
        *args: Any,
        context: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The lowered program, as `jax.jit(...).lower(...)` gives it, to see what is compiled."""
        return self._program.lower(self._arguments(model, opt, args, kwargs, context))

    def _arguments(
        self, model: Any, opt: Any, args: Any, kwargs: Any, context: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if not isinstance(opt, Optimizer):
            raise TypeError(
                "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, "
                f"got {type(opt).__name__} in its place."
            )
        check_guards(opt)
        known = {}
        if context is not None:
            if not isinstance(context, Mapping):
                raise TypeError(
                    "`context` must be a dict of what the transforms are told, such as "
                    f"`context={{'key': key}}`, got a {type(context).__name__}. An argument of "
                    "the loss that has this name is passed by position."
                )
            own = {"value", "grad", "value_fn"} | (
                {"weight"} if self.options.has_aux == "weight" else set()
            )
            for name in context:
                if name in own:
                    raise TypeError(
                        f"The training step passes '{name}' itself: leave it out of `context`."
                    )
            known = as_known(context)
        return {"args": args, "context": known, "kwargs": kwargs, "model": model, "opt": opt}

    def __reduce__(self) -> Any:
        # Programs are not pickled: they are compiled anew where the loss arrives.
        return TrainStep, (self.loss_fn, self.options)

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        given = self.options._asdict()
        changed = [f", {k}={v!r}" for k, v in given.items() if v != _DEFAULTS[k]]
        return f"sl.train_step({name}{''.join(changed)})"


_DEFAULTS = Options(False, True, None, None, False)._asdict()


def _program(loss_fn: Any, options: Options) -> Program:
    """One program per loss: making the step anew, in a loop say, does not compile anew."""
    # A method is another object each time that it is looked up.
    method = hasattr(loss_fn, "__self__") and hasattr(loss_fn, "__func__")
    own = (id(loss_fn.__self__), id(loss_fn.__func__)) if method else (id(loss_fn), 0)
    if own not in _programs:
        # A reference that kept the loss alive would keep its own entry alive, for ever; the
        # steps hold the loss.
        refer = weakref.WeakMethod if method else weakref.ref
        try:
            get_loss_fn = refer(loss_fn, lambda _: _programs.pop(own, None))
        except TypeError:  # a loss that cannot be referenced weakly
            return Program(_body(lambda: loss_fn, options), carried, donate=options.donate)
        _programs[own] = get_loss_fn, {}
    get_loss_fn, known = _programs[own]
    # With the types: 1 == True would otherwise share a program.
    key = (*options, *map(type, options.batch_args or ()))
    if key not in known:
        known[key] = Program(_body(get_loss_fn, options), carried, donate=options.donate)
    return known[key]


def _body(get_loss_fn: Callable[[], Any], options: Options) -> Callable[[Any], Any]:
    """Gradient and step, as one function of arrays."""

    def train_step(arguments: Any) -> tuple[list[Any], Any]:
        loss_fn = get_loss_fn()
        opt, args, kwargs = arguments["opt"], arguments["args"], arguments["kwargs"]
        model = split(arguments["model"], opt.binding.trainable)

        def evaluate(whole: Any, given: Any) -> Evaluated:
            args, kwargs = given
            return evaluated(loss_fn(whole, *args, **kwargs), options.has_aux)

        def differentiate(given: Any) -> tuple[list[Any], Any]:
            def loss_of(trained: list[Any]) -> Any:
                made = evaluate(model.join(trained), given)
                return made.loss, pack(made)

            return jax.grad(loss_of, has_aux=True)(trained)

        def value_fn(whole: Any) -> Any:
            def value(given: Any) -> tuple[list[Any], Any]:
                return [], pack(evaluate(whole, given)._replace(aux=None))

            return over(value, [])[1].loss

        def over(
            of: Callable[[Any], tuple[list[Any], Any]], like: list[Any]
        ) -> tuple[list[Any], Evaluated]:
            if options.microbatches is None:
                means, packed = of((args, kwargs))
                return means, unpack(packed)
            batch = batch_of(loss_fn, args, kwargs, options.batch_args, "microbatches")
            return over_microbatches(of, like, batch, options.microbatches, options.has_aux)

        trained = [strong(x) for x in jax.tree.leaves(model.params)]
        as_params = jax.tree.structure(model.params).unflatten
        transform, link = opt.transform, first_link(opt.transform)

        def ascent(grads: list[Any]) -> Any:
            # JAX differentiates a real loss of complex z to the conjugate of its steepest ascent.
            return as_params(map(jnp.conj, grads))

        if link.per_example:
            _check_per_example(options, link)
            batch = batch_of(loss_fn, args, kwargs, options.batch_args, "examples")
            if not isinstance(link, AbstractPerExampleTransform) or options.microbatches is None:
                stacked, made = over_examples(differentiate, batch)
                grads, mean = ascent(stacked), ascent([jnp.mean(g, axis=0) for g in stacked])
            else:
                parts_of = (batch, options.microbatches)
                clock = Context(step=opt.count)
                like = as_params(trained)
                grads, gathered, means, made = gather(differentiate, link, *parts_of, like, clock)
                mean = ascent(means)
                transform = with_first_link(transform, gathered)
        elif options.reuse_linesearch:

            def anew() -> tuple[Any, Any]:
                means, made = over(differentiate, trained)
                return made.loss, ascent(means)

            loss, grads = recalled(transform, opt.state, anew)
            made, mean = Evaluated(loss, None, None), grads
        else:
            means, made = over(differentiate, trained)
            grads = mean = ascent(means)

        needs = {name for part in transforms(opt.transform) for name in part.module.needs}
        known = {"value": made.loss} | arguments["context"]
        if options.has_aux == "weight":
            known["weight"] = made.weight
        if "grad" in needs:
            known["grad"] = mean
        if "value_fn" in needs:
            known["value_fn"] = value_fn
        params, state = advance(opt, model, grads, known, transform=transform)
        loss = made.loss
        return jax.tree.leaves(params) + state, (loss, made.aux) if options.has_aux else loss

    return train_step


def _check_per_example(options: Options, link: AbstractTransform) -> None:
    """Refuses what has no meaning where each example is differentiated by itself."""
    gathers = isinstance(link, AbstractPerExampleTransform)
    if options.microbatches is not None and not gathers:
        raise TypeError(
            f"{type(link).__name__} takes a gradient for each example of the whole batch. For "
            "microbatches, let it subclass `sl.AbstractPerExampleTransform`, which gathers sums."
        )
    if options.has_aux == "weight":
        raise ValueError(
            "The first link takes a gradient for each example and counts all alike: there is no "
            'weight to be told of. Leave out `has_aux="weight"`.'
        )
    if options.reuse_linesearch:
        raise ValueError(
            "The first link takes a gradient for each example, and a line search knows that of the "
            "mean only: leave out `reuse_linesearch=True`."
        )
