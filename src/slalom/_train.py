"""The training step: gradient, optimizer step and donation, compiled as one."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._jit import Program, pack, unpack
from ._model import split, strong
from ._optimizer import Optimizer, advance, carried, refuse
from ._transform import parts
from .tree import is_array

_programs: "weakref.WeakKeyDictionary[Any, dict[Any, Program]]" = weakref.WeakKeyDictionary()


def train_step(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, donate: bool = True
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

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a real scalar, or with
        `has_aux` a pair of it and any tree.
    - `has_aux`: whether the loss returns something beside.
    - `donate`: whether the step may use the memory of the trainable leaves and of the optimizer's
        state for its result. The model and optimizer that were passed cannot be used again then.
        Frozen leaves, hyperparameters, keys and the batch are never donated.

    **Returns:** `step(model, opt, *args, **kwargs)`, which returns `(model, opt, loss)`, or with
    `has_aux` `(model, opt, (loss, aux))`. Arrays are traced; anything else among the arguments
    is static, and another value of it compiles another program.
    """
    if not callable(loss_fn):
        raise TypeError(f"train_step takes a loss function, got {loss_fn!r}.")
    return TrainStep(loss_fn, has_aux, donate)


class TrainStep:
    """What `train_step` returns."""

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, donate: bool):
        self.loss_fn = loss_fn
        self.has_aux = has_aux
        self.donate = donate
        self._program = _program(loss_fn, has_aux, donate)

    def __call__(self, model: Any, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(opt, Optimizer):
            raise TypeError(
                "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, "
                f"got {type(opt).__name__} in its place."
            )
        refuse(opt)
        after, loss = self._program({"args": args, "kwargs": kwargs, "model": model, "opt": opt})
        return after["model"], after["opt"], loss

    def lower(self, model: Any, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        """The lowered program, as `jax.jit(...).lower(...)` gives it, to see what is compiled."""
        return self._program.lower({"args": args, "kwargs": kwargs, "model": model, "opt": opt})

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        options = (", has_aux=True" if self.has_aux else "") + (
            "" if self.donate else ", donate=False"
        )
        return f"sl.train_step({name}{options})"


def _program(loss_fn: Callable[..., Any], has_aux: bool, donate: bool) -> Program:
    """One program per loss: making the step anew, in a loop say, does not compile anew."""
    try:
        known = _programs.setdefault(loss_fn, {})
    except TypeError:  # a loss that cannot be hashed or referenced weakly
        return Program(_body(lambda: loss_fn, has_aux), carried, donate=donate)
    if (has_aux, donate) not in known:
        # A reference that kept the loss alive would keep its own entry alive, for ever; the
        # steps hold the loss.
        body = _body(weakref.ref(loss_fn), has_aux)
        known[has_aux, donate] = Program(body, carried, donate=donate)
    return known[has_aux, donate]


def _body(get_loss_fn: Callable[[], Any], has_aux: bool) -> Callable[[Any], Any]:
    """Gradient and step, as one function of arrays."""

    def train_step(arguments: Any) -> tuple[list[Any], Any]:
        loss_fn = get_loss_fn()
        opt, args, kwargs = arguments["opt"], arguments["args"], arguments["kwargs"]
        model = split(arguments["model"], opt.binding.trainable)

        def value_fn(whole: Any) -> Any:
            return _loss_and_aux(loss_fn(whole, *args, **kwargs), has_aux)

        def loss_of(trained: list[Any]) -> Any:
            loss, aux = value_fn(model.join(trained))
            return loss, pack((loss, aux))

        trained = [strong(x) for x in jax.tree.leaves(model.params)]
        grads, packed = jax.grad(loss_of, has_aux=True)(trained)
        loss, aux = unpack(packed)
        # JAX differentiates a real loss of complex z to the conjugate of its steepest ascent.
        grads = jax.tree.structure(model.params).unflatten(map(jnp.conj, grads))

        needs = {name for part in parts(opt.transform) for name in part.transform.needs}
        known = {"value": loss}
        if "grad" in needs:
            known["grad"] = grads
        if "value_fn" in needs:
            known["value_fn"] = lambda whole: value_fn(whole)[0]
        params, state = advance(opt, model, grads, known)
        return jax.tree.leaves(params) + state, (loss, aux) if has_aux else loss

    return train_step


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """What the loss returned, refused where it cannot be differentiated."""
    loss, aux = result, None
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"With `has_aux=True` the loss must return a pair (loss, aux), got {_kind(result)}."
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
    return loss, aux


def _kind(result: Any) -> str:
    """What the loss returned, in words."""
    if is_array(result):
        return f"an array of shape {result.shape}"
    size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
    return f"a {type(result).__name__}{size}"
