"""The training step: gradient, optimizer step and donation, compiled as one."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ._batch import Batch, batch_of
from ._chain import first_link
from ._jit import Program, pack, unpack
from ._model import split, strong
from ._optimizer import Optimizer, advance, carried, refuse
from ._schedule import canonical_float
from ._step import as_known
from ._transform import parts
from .transforms.linesearch import recalled
from .tree import accumulation_dtype, is_array, map_leaves

_programs: "weakref.WeakKeyDictionary[Any, dict[Any, Program]]" = weakref.WeakKeyDictionary()


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool | Literal["weight"] = False,
    donate: bool = True,
    microbatches: int | None = None,
    batch_args: int | str | tuple[int | str, ...] | list[int | str] | None = None,
    reuse: bool = False,
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
    - `reuse`: whether loss and gradient are those that the line search at the end of the step
        before left in its state; they are computed in the first step only. For a loss that is
        one function throughout (the same data in each step, nothing random), and a model that
        nothing but the step changes. Not with `has_aux`.

    **Returns:** `step(model, opt, *args, context=None, **kwargs)`, which returns
    `(model, opt, loss)`, or with `has_aux` `(model, opt, (loss, aux))`; over `microbatches`, or
    examples, the arrays of `aux` are stacked along a new first axis, and of weights it is the
    total. Arrays are
    traced; anything else among the arguments is static, and another value of it compiles another
    program. `context`, a dict, holds what `opt.step` takes as keywords, for the transforms: `key`,
    `weight`, `per_param`, and what custom transforms declare under `needs`.
    """
    if not callable(loss_fn):
        raise TypeError(f"train_step takes a loss function, got {loss_fn!r}.")
    if has_aux not in (True, False, "weight"):
        raise TypeError(f'train_step.has_aux must be a bool or "weight", got {has_aux!r}.')
    if microbatches is not None:
        if not isinstance(microbatches, int) or isinstance(microbatches, bool):
            raise TypeError(f"train_step.microbatches must be an int, got {microbatches!r}.")
        if microbatches < 1:
            raise ValueError(f"train_step.microbatches must be at least 1, got {microbatches}.")
    if batch_args is not None:
        batch_args = (batch_args,) if isinstance(batch_args, int | str) else tuple(batch_args)
    if reuse and has_aux:
        raise ValueError(
            "With `reuse=True` the loss is not computed at the model that is passed, so there is "
            "nothing to return beside it: drop `has_aux`."
        )
    return TrainStep(loss_fn, Options(has_aux, donate, microbatches, batch_args, reuse))


class Options(NamedTuple):
    """What `train_step` was told beside the loss."""

    has_aux: bool | Literal["weight"]
    donate: bool
    microbatches: int | None
    batch_args: tuple[int | str, ...] | None
    reuse: bool


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
        refuse(opt)
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

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        given = self.options._asdict()
        changed = [f", {k}={v!r}" for k, v in given.items() if v != _DEFAULTS[k]]
        return f"sl.train_step({name}{''.join(changed)})"


_DEFAULTS = Options(False, True, None, None, False)._asdict()


def _program(loss_fn: Callable[..., Any], options: Options) -> Program:
    """One program per loss: making the step anew, in a loop say, does not compile anew."""
    # With the types: 1 == True would otherwise share a program.
    key = (*options, *map(type, options.batch_args or ()))
    try:
        known = _programs.setdefault(loss_fn, {})
    except TypeError:  # a loss that cannot be hashed or referenced weakly
        return Program(_body(lambda: loss_fn, options), carried, donate=options.donate)
    if key not in known:
        # A reference that kept the loss alive would keep its own entry alive, for ever; the
        # steps hold the loss.
        body = _body(weakref.ref(loss_fn), options)
        known[key] = Program(body, carried, donate=options.donate)
    return known[key]


class _Evaluated(NamedTuple):
    """A loss and what came beside it, from one batch."""

    loss: Any
    weight: Any
    aux: Any


def _body(get_loss_fn: Callable[[], Any], options: Options) -> Callable[[Any], Any]:
    """Gradient and step, as one function of arrays."""

    def train_step(arguments: Any) -> tuple[list[Any], Any]:
        loss_fn = get_loss_fn()
        opt, args, kwargs = arguments["opt"], arguments["args"], arguments["kwargs"]
        model = split(arguments["model"], opt.binding.trainable)

        def evaluate(whole: Any, given: Any) -> _Evaluated:
            args, kwargs = given
            return _evaluated(loss_fn(whole, *args, **kwargs), options.has_aux)

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
        ) -> tuple[list[Any], _Evaluated]:
            if options.microbatches is None:
                means, packed = of((args, kwargs))
                return means, unpack(packed)
            batch = batch_of(loss_fn, args, kwargs, options.batch_args, "microbatches")
            return _over_microbatches(of, like, batch, options.microbatches, options.has_aux)

        trained = [strong(x) for x in jax.tree.leaves(model.params)]
        examples = first_link(opt.transform).per_example

        def loss_and_gradient() -> tuple[_Evaluated, Any]:
            if examples:
                _check_per_example(options)
                batch = batch_of(loss_fn, args, kwargs, options.batch_args, "examples")
                grads, made = _over_examples(differentiate, batch)
            else:
                grads, made = over(differentiate, trained)
            # JAX differentiates a real loss of complex z to the conjugate of its steepest ascent.
            return made, jax.tree.structure(model.params).unflatten(map(jnp.conj, grads))

        if options.reuse:

            def first() -> tuple[Any, Any]:
                made, grads = loss_and_gradient()
                return made.loss, grads

            loss, grads = recalled(opt.transform, opt.state, first)
            made = _Evaluated(loss, None, None)
        else:
            made, grads = loss_and_gradient()

        needs = {name for part in parts(opt.transform) for name in part.transform.needs}
        known = {"value": made.loss} | arguments["context"]
        if options.has_aux == "weight":
            known["weight"] = made.weight
        if "grad" in needs:
            mean = functools.partial(jnp.mean, axis=0)
            known["grad"] = jax.tree.map(mean, grads) if examples else grads
        if "value_fn" in needs:
            known["value_fn"] = value_fn
        params, state = advance(opt, model, grads, known)
        loss = made.loss
        return jax.tree.leaves(params) + state, (loss, made.aux) if options.has_aux else loss

    return train_step


def _check_per_example(options: Options) -> None:
    """Refuses what has no meaning where each example is differentiated by itself."""
    if options.microbatches is not None:
        raise ValueError(
            "The first link takes a gradient for each example, and clips them all before it adds "
            "anything: microbatches cannot be averaged before it. Leave out `microbatches`, and "
            "accumulate behind it: `first_link | rest.every_k(k)`."
        )
    if options.has_aux == "weight":
        raise ValueError(
            "The first link takes a gradient for each example and counts all alike: there is no "
            'weight to be told of. Leave out `has_aux="weight"`.'
        )
    if options.reuse:
        raise ValueError(
            "The first link takes a gradient for each example, and a line search knows that of the "
            "mean only: leave out `reuse=True`."
        )


def _over_examples(
    of: Callable[[Any], tuple[list[Any], Any]], batch: Batch
) -> tuple[list[Any], _Evaluated]:
    """What `of` returns of each example, stacked, and the mean of the losses."""
    grads, packed = jax.vmap(lambda rows: of(batch.example(rows)))(batch.arrays)
    made = unpack(packed)
    losses = jnp.asarray(made.loss, accumulation_dtype(made.loss.dtype))
    return grads, made._replace(loss=jnp.asarray(jnp.mean(losses), made.loss.dtype))


def _over_microbatches(
    of: Callable[[Any], tuple[list[Any], Any]],
    like: list[Any],
    batch: Batch,
    number: int,
    has_aux: bool | Literal["weight"],
) -> tuple[list[Any], _Evaluated]:
    """The weighted mean over microbatches of arrays like `like`, which `of` returns, and of the
    loss."""
    if batch.size % number:
        raise ValueError(
            f"The batch has {batch.size} examples, of which {number} microbatches cannot be made "
            f"of equal size. Pass a multiple of {number}, or pad the batch and let the loss return "
            'a weighted mean and its weight, with `has_aux="weight"`.'
        )

    def body(carry: Any, i: Any) -> Any:
        total, means = carry
        new, packed = of(batch.microbatch(i, number))
        weight = jnp.asarray(unpack(packed).weight, total.dtype)
        total = total + weight
        share = weight / jnp.where(total == 0, 1, total)

        def rule(mean: Any, new: Any, weight: Any, share: Any) -> Any:
            mixed = mean + (new - mean) * share
            # Padding alone, whatever stands in it, leaves no trace.
            return jnp.where(weight == 0, mean, mixed) if has_aux == "weight" else mixed

        # A mean and no sum: what comes after would otherwise be divided, which takes a buffer.
        means = map_leaves(rule, (means, new), (weight, share))
        return (total, means), packed

    means = [jnp.zeros_like(x, accumulation_dtype(x.dtype)) for x in like]
    begin = (jnp.zeros((), canonical_float()), means)
    (total, means), packed = jax.lax.scan(body, begin, jnp.arange(number))
    made = unpack(packed)
    weights = jnp.asarray(made.weight, total.dtype)
    losses = jnp.asarray(made.loss, accumulation_dtype(made.loss.dtype))
    shares = jnp.asarray(weights / jnp.where(total == 0, 1, total), losses.dtype)
    loss = jnp.sum(jnp.where(weights == 0, 0, losses * shares))
    loss = jnp.asarray(loss, made.loss.dtype)
    return means, _Evaluated(loss, total, total if has_aux == "weight" else made.aux)


def _evaluated(result: Any, has_aux: bool | Literal["weight"]) -> _Evaluated:
    """What the loss returned, refused where it cannot be differentiated."""
    loss, aux = result, None
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            second = "weight" if has_aux == "weight" else "aux"
            raise TypeError(
                f"With `has_aux={has_aux!r}` the loss must return a pair (loss, {second}), got "
                f"{_kind(result)}."
            )
        loss, aux = result
    if loss is None:
        raise TypeError("The loss returned None. Does the function end with `return`?")
    if not is_array(loss) and not isinstance(loss, int | float | complex):
        raise TypeError(
            f"The loss returned {_kind(loss)}. To return something beside the loss, write "
            "`sl.train_step(loss_fn, has_aux=True)` and return a pair (loss, aux)."
        )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"The loss must be a scalar, got an array of shape {loss.shape}. Average it over the "
            "batch, for example with `jnp.mean`."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"The loss must be a real floating number, got dtype {loss.dtype}.")
    if has_aux != "weight":
        return _Evaluated(loss, jnp.ones((), canonical_float()), aux)
    if not is_array(aux) and not isinstance(aux, int | float):
        raise TypeError(f"The weight that the loss returns must be a scalar, got {_kind(aux)}.")
    weight = jnp.asarray(aux)
    if weight.shape != () or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ValueError(
            "The weight that the loss returns must be a real scalar, got an array of shape "
            f"{weight.shape} and dtype {weight.dtype}."
        )
    weight = jnp.asarray(weight, canonical_float())
    return _Evaluated(loss, weight, weight)


def _kind(result: Any) -> str:
    """What the loss returned, in words."""
    if is_array(result):
        return f"an array of shape {result.shape}"
    size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
    return f"a {type(result).__name__}{size}"
