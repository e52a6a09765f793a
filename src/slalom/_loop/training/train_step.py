"""`sl.train_step`."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from jaxtyping import Array

from ..._core.text.calls import advise_keywords, advise_positions
from ...tree.types import is_function
from ..programs.arguments import as_tree
from .batch_loss import as_compute_dtype
from .options import BatchArgs, Options, TrainOptions
from .step import TrainStep

P = ParamSpec("P")
R = TypeVar("R")

LossFn: TypeAlias = Callable[Concatenate[Any, P], R]


@overload
def train_step(loss_fn: LossFn[P, Any], **options: Unpack[TrainOptions]) -> TrainStep[P, Array]: ...
@overload
def train_step(
    loss_fn: LossFn[P, R],
    *,
    has_aux: bool = False,
    has_weight: bool = False,
    **options: Unpack[TrainOptions],
) -> TrainStep[P, R]: ...
@overload
def train_step(
    **options: Unpack[TrainOptions],
) -> Callable[[LossFn[P, Any]], TrainStep[P, Array]]: ...
@overload
def train_step(
    *,
    has_aux: bool = False,
    has_weight: bool = False,
    **options: Unpack[TrainOptions],
) -> Callable[[LossFn[P, R]], TrainStep[P, R]]: ...
@advise_positions(
    "Make the step of the loss, `step = sl.train_step(loss_fn)`, and then call it: "
    "`model, opt, loss = step(model, opt, x, y)`."
)
@advise_keywords
def train_step(
    loss_fn: Any = None,
    *,
    has_aux: bool = False,
    has_weight: bool = False,
    donate: Any = "opt",
    microbatches: Any = None,
    batch_args: BatchArgs = None,
    reuse_linesearch: bool = False,
    transform_grads: Any = None,
    compute_dtype: Any = None,
    sampled_loss_fn: Any = None,
) -> Any:
    """Makes a compiled training step from a loss.

    ```python
    >>> @sl.train_step
    ... def step(model, x, y):
    ...     return jnp.mean((jax.vmap(model)(x) - y) ** 2)
    >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.adam(1e-3), model)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)), jnp.zeros((4, 1)))

    ```

    The step differentiates with respect to the trainable leaves only, conjugates complex gradients,
    and passes `value` and, to transforms that need them, `grad` and `value_fn`. Dispatch is
    asynchronous: `float(loss)` blocks until the step has finished. A loss that uses `eqx.error_if`
    is compiled with `eqx.filter_jit` instead, without donation, so that it raises Equinox's error
    and the model stays valid.

    With `microbatches=m`, the loss is differentiated on m parts of the batch in sequence, and the
    gradients are averaged in at least float32. The result is the step of the whole batch, but needs
    only the memory of one part and an accumulator. Part i consists of the examples i, i + m,
    i + 2m, …, so that a batch which is sharded over devices is not moved. If the parts have unequal
    weights, for example because of padding, let the loss return a weighted mean and its total
    weight:

    ```python
    >>> @sl.train_step(has_weight=True, microbatches=2)
    ... def step(model, x, y, mask):
    ...     errors = (jax.vmap(model)(x) - y) ** 2
    ...     return jnp.sum(errors * mask) / jnp.maximum(jnp.sum(mask), 1), jnp.sum(mask)
    >>> batch = jnp.ones((4, 2)), jnp.zeros((4, 1)), jnp.array([[1.0], [1.0], [1.0], [0.0]])
    >>> model, opt, (loss, weight) = step(model, opt, *batch)
    >>> float(weight)
    3.0

    ```

    If the first link of the optimizer needs per-example gradients, such as
    `sl.DifferentiallyPrivateAggregate`, the loss is differentiated for each example separately. It
    is called with batches of size 1, and the step returns the mean loss. With `microbatches`, the
    parts of the batch are processed in sequence.

    A PRNG key among the arguments, such as `jax.random.key(0)`, is split into one for each
    microbatch or example, so that every part has its own dropout mask: part i gets
    `jax.random.split(key, m)[i]`. An array of keys is divided like any other array.

    With `compute_dtype="bfloat16"`, the parameters stay in float32, and the loss is computed in
    bfloat16. Its gradients are float32, and so are their means over microbatches. A mean over the
    batch needs the digits of float32, so let the loss cast the result of the model:

    ```python
    >>> @sl.train_step(compute_dtype="bfloat16")
    ... def step(model, x, y):
    ...     errors = (jax.vmap(model)(x) - y).astype(jnp.float32)
    ...     return jnp.mean(errors**2)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)), jnp.zeros((4, 1)))
    >>> model.layers[0].weight.dtype
    dtype('float32')

    ```

    For float16, use `tx.scale_loss()` too. The step then differentiates the loss times
    `opt.loss_scale`, and returns the loss itself.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`. Returns a real scalar, or a tuple as
        described below. A dict of scalars in its place is summed; `tx.combine` weights its terms.
        The arrays of a loss that carries some (an Equinox module or a method of one,
        `functools.partial`, `jax.tree_util.Partial`) are traced, so that another such object does
        not recompile. Without a loss, `train_step` returns a decorator.
    - `has_aux`: whether the loss returns `(loss, aux)`, where `aux` is any tree.
    - `has_weight`: whether the loss returns `(loss, weight)`, or with `has_aux`
        `(loss, weight, aux)`. The weight of the batch is a real scalar ≥ 0, such as its number of
        tokens. It is used for the mean over microbatches. The total is passed to the optimizer,
        where `.every_k` uses it as the weight of the mini-batch.
    - `donate`: which memory the step reuses for its result. `"opt"`: the memory of the optimizer's
        state; the optimizer that was passed cannot be used again. `"all"`: the memory of the
        trainable parameters too, so that the model cannot be used again either. `False`: none.
        Frozen leaves, hyperparameters, keys and the batch are never donated. `step.last` holds the
        results of the last call, so that a signal such as Ctrl-C cannot lose them.
    - `microbatches`: the number of parts in which the batch is differentiated, an int ≥ 1 that
        divides the number of examples. `"split"`: the batch comes split, and every array in it has
        the parts along its leading axis and the examples along its second one.
    - `batch_args`: the arguments that contain the batch, by name or by position after `opt`. Every
        array in them has the examples along its leading axis. Defaults to all arguments.
    - `reuse_linesearch`: whether to reuse the loss and gradient that the line search at the end of
        the chain computed in the previous step, instead of computing them again. Requires a
        deterministic loss, the same data in every step, and a model that only the step changes.
        Cannot be combined with `has_aux` or `has_weight`.
    - `transform_grads`: a function of the gradients, called before the optimizer sees them. It
        takes and returns a tree like the model, with `None` for everything that is not trainable,
        for example `lambda grads: jax.lax.pmean(grads, "data")`.
    - `compute_dtype`: the dtype of the forward and backward pass, `"bfloat16"`, `"float16"`,
        `"float32"` or `"float64"`. The loss is called with all real floating arrays of the model
        and of its arguments in this dtype. Integers, bools, complex arrays, PRNG keys,
        `eqx.nn.State`, the `model_state` of a scan, and arrays that the loss itself carries stay as
        they are. Gradients have the dtypes of the parameters. Defaults to the dtypes as they are.
    - `sampled_loss_fn`: for transforms that estimate the curvature from labels which are drawn from
        the model, such as `sl.contrib.sophia` with `"gauss_newton_bartlett"`. It is called as
        `sampled_loss_fn(model, key, *args, **kwargs)`, in the steps that make an estimate, and
        returns the mean of the loss over drawn labels, and the number of them.

    **Returns:** `step(model, opt, *args, context=None, **kwargs)`, which returns `(model, opt,
    loss)`. With `has_aux` or `has_weight` the third result is the tuple that the loss returned.
    With `microbatches`, or per-example gradients, the arrays of `aux` are stacked along new first
    axes, and `weight` is the total. An `eqx.nn.State` that the loss takes and returns in `aux` goes
    from one microbatch to the next, and is returned as the last one left it. Arrays are traced. All
    other arguments are static, and another value of one compiles another program. `context` is a
    dict of keywords of `opt.step`, for the transforms: `key`, `weight`, `per_param`, and inputs
    that custom transforms declare in `needs`.
    """
    if batch_args is not None:
        batch_args = (batch_args,) if isinstance(batch_args, int | str) else tuple(batch_args)
    options = Options(
        has_aux,
        has_weight,
        donate,
        microbatches,
        batch_args,
        reuse_linesearch,
        transform_grads,
        as_compute_dtype(compute_dtype),
        as_tree(sampled_loss_fn),
    )
    options.check()
    if loss_fn is None:
        return lambda loss_fn: _step_of(loss_fn, options)
    return _step_of(loss_fn, options)


def _step_of(loss_fn: Any, options: Options) -> TrainStep[Any, Any]:
    if isinstance(loss_fn, TrainStep):
        raise TypeError(
            f"Got {loss_fn!r}, which is a training step already, where the loss itself belongs: "
            "pass the function that `sl.train_step` was called with."
        )
    if not is_function(loss_fn):
        raise TypeError(
            f"train_step takes a loss function, got {loss_fn!r}. Pass the function itself, without "
            "calling it: `step = sl.train_step(loss_fn)`."
        )
    if type(loss_fn).__module__.startswith("equinox.nn"):
        raise TypeError(
            f"train_step takes a loss function, got a {type(loss_fn).__name__}. Write a function "
            "`loss_fn(model, x, y)` that returns a scalar; the step gets the model: `step(model, "
            "opt, x, y)`."
        )
    return TrainStep(loss_fn, options)
