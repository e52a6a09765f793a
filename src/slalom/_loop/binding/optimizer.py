"""The optimizer: a transform, its state and a step count, bound to the parameters of one model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..._core.fields.hyperparams import replace
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.slots import reset
from ..._core.text.calls import advise_positions
from ..._core.text.mistakes import frozen, no_attribute, optimizer_advice
from ...tree.packed import pack
from ...tree.paths import leaf_paths
from ...tree.types import PyTree, WhereLike
from ...where.masks import check_matches, mask
from ...where.resolve import as_where, as_where_or_none
from ..programs.compiled import StepInputs, compiled_step, compiled_update, source_of
from ..reports.rebind import AS_BEFORE, AsBefore, Rebinding, Rebound, carry
from ..reports.rows import rows_of
from ..sharding.placement import StateSharding
from ..sharding.shard import ShardedState, shard
from .abstract_optimizer import AbstractOptimizer
from .binding import Arrays, bind, bind_to_model, by_path, init_state, no_transform
from .loop_warnings import watch_results
from .model import Model, split, strong
from .stepping import (
    KEYWORDS,
    as_keywords,
    check_arrays,
    check_can_step,
    check_one_run,
    check_readable,
)

_BOUND = (
    "An optimizer is bound to a model: write `sl.Optimizer(tx, model)`. It creates the state for "
    "the arrays of the model."
)
_advise_positions = advise_positions(
    "An optimizer holds its state: write `model, opt = opt.step(model, grads)`. Name the others, "
    "such as `value=loss`."
)


class Optimizer(AbstractOptimizer):
    """A transform together with its state, bound to the parameters of a model.

    ```python
    >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.adam(1e-3), model)
    >>> grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    >>> model, opt = opt.step(model, grads)

    ```

    An optimizer is immutable, and all its leaves are JAX arrays. It can be carried through
    `jax.lax.scan`, passed through plain `jax.jit`, batched with `vmap` over its hyperparameters,
    differentiated and saved.
    """

    @advise_positions(_BOUND, "Optimizer")
    def __init__(
        self,
        transform: AbstractTransform[Any],
        model: PyTree,
        *,
        trainable: WhereLike | None = None,
        hyperparam_dtype: Any | None = None,
    ):
        """Initializes the state of a transform for the parameters of a model.

        **Arguments:**

        - `transform`: the transform. Its numbers become 0-d arrays of dtype float32 (float64 under
            x64), or of the dtype of the array that was passed.
        - `model`: any tree: a module with functions and ints inside, a dict of arrays, a tuple of
            models. The optimizer does not keep it. A tree of `jax.ShapeDtypeStruct`s makes an
            optimizer of those, to plan memory and sharding with.
        - `trainable`: which floating and complex arrays to train: a selector, a function or a tree
            of bools. Defaults to all, except in optimizers inside the model and in parts that it
            marks as frozen, with `paramax.NonTrainable` or `__frozen__ = ("path", ...)` in a class.
            The others have no state and no weight decay, do not contribute to norms, and never
            change.
        - `hyperparam_dtype`: the dtype of all hyperparameters. Defaults to the dtypes above.
        """
        if not isinstance(transform, AbstractTransform):
            at, call = "first argument of an optimizer", "sl.Optimizer(tx, model)"
            raise TypeError(no_transform(transform, [model], at, call))
        if model is None:
            raise TypeError(_BOUND)
        where = as_where_or_none(trainable)
        self.arrays, binding = bind_to_model(transform, model, where, hyperparam_dtype)
        self.binding = dataclasses.replace(binding, source=source_of(transform, binding))

    _refuses_calls: ClassVar[bool] = True
    __frozen__: ClassVar[tuple[str, ...]] = ("**",)

    if not TYPE_CHECKING:  # a type checker would otherwise accept every name, and calls

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(
                "An optimizer is not a function. Write `model, opt = opt.step(model, grads)`, or "
                "make a training step, `step = sl.train_step(loss_fn)`, and call that: `model, "
                "opt, loss = step(model, opt, x, y)`."
            )

        def __getattr__(self, name: str) -> Any:
            return no_attribute(self, name, optimizer_advice)

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except dataclasses.FrozenInstanceError:
                raise frozen(self, name) from None

    # --- steps ------------------------------------------------------------------------------

    @_advise_positions
    def step(
        self,
        model: Model,
        grads: PyTree,
        *,
        value: Any = None,
        grad: PyTree | None = None,
        value_fn: Callable[[Any], Any] | None = None,
        key: Any = None,
        weight: Any = None,
        per_param: Mapping[str, PyTree] | None = None,
        **extra: Any,
    ) -> "tuple[Model, Optimizer]":
        """Updates the model. Compiled on first use, and inlined under an outer `jit`.

        The model comes first, unlike in `optax.GradientTransformation.update`.

        **Arguments:**

        - `model`: the whole model, as passed to `sl.Optimizer`.
        - `grads`: its gradients, as `eqx.filter_grad` returns them: arrays, and `None` for
            everything that is not trainable. Complex gradients must be conjugated, because
            `jax.grad` returns the conjugate of the direction of steepest ascent. `sl.train_step`
            conjugates them for you.
        - `value`: the loss, for transforms that use it. It is always accepted.
        - `grad`: the gradient of the loss, likewise.
        - `value_fn`: the loss as a function of the model, likewise. The function is static, so a
            new function in every step, such as a lambda, recompiles every time. To pass data, use
            `jax.tree_util.Partial(loss_fn, x=x)`, whose arrays are traced.
        - `key`: a PRNG key for this step.
        - `weight`: the weight of this mini-batch in an accumulated mean.
        - `per_param`: a dict from names to trees like the parameters, for transforms that use them.
        - `extra`: inputs that custom transforms declare in `needs`.

        **Returns:** the new model, with unchanged dtypes and with the same objects for everything
        that is not trainable; and the new optimizer.

        **Raises:** `ValueError` or `TypeError`, before anything is computed, for gradients that do
        not match the model, a model other than the bound one, a missing input that a transform
        needs, or an unknown keyword.
        """
        check_can_step(self)
        keywords = _keywords(value, grad, value_fn, key, weight, per_param, extra)
        after, _ = compiled_step(StepInputs(grads, keywords, model, self))
        watch_results(model, self, after.model, after.opt)
        return after.model, after.opt

    @_advise_positions
    def update(
        self,
        model: Model,
        grads: PyTree,
        *,
        value: Any = None,
        grad: PyTree | None = None,
        value_fn: Callable[[Any], Any] | None = None,
        key: Any = None,
        weight: Any = None,
        per_param: Mapping[str, PyTree] | None = None,
        **extra: Any,
    ) -> "tuple[Model, Optimizer]":
        """Computes the updates without applying them.

        **Arguments:** as for `step`.

        **Returns:** the updates, in the dtypes of the parameters and `None` for everything that is
        not trainable, to be added with `sl.apply_updates(model, updates)`; and the new optimizer.
        """
        check_can_step(self)
        keywords = _keywords(value, grad, value_fn, key, weight, per_param, extra)
        after, updates = compiled_update(StepInputs(grads, keywords, model, self))
        return updates, after.opt

    # --- hyperparameters --------------------------------------------------------------------

    def with_hyperparams(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        replace_schedules: bool = False,
        **named: Any,
    ) -> "Optimizer":
        """Returns an optimizer with other hyperparameters.

        Replacing a number by a number never recompiles. The state stays as it is: numbers that set
        the initial state, such as the `learning_rate` of `sl.rprop`, act from the next
        `opt.reset(model)` on.

        **Arguments:**

        - `values`: new values by path: a full path, an unambiguous suffix, or a glob such as
            `"partition.disc.**.learning_rate"`, which sets every hyperparameter that it matches. A
            number is cast to the dtype, shape and sharding of the old value. For an optimizer
            created under `vmap`, an array has one entry per run. A function is applied to the old
            value: `lambda lr: lr / 2`. A schedule replaces the old value.
        - `replace_schedules`: whether a number may replace a schedule. This changes the program,
            so the next step recompiles once.
        - `named`: the same as keywords: `learning_rate=1e-4`.

        **Returns:** a new optimizer, with the same state and step count.

        **Raises:** `KeyError` for an unknown or ambiguous name, with the candidates; `ValueError`
        for a value outside its interval.
        """
        if not isinstance(values, Mapping | None):
            raise TypeError(
                f"`with_hyperparams` takes a mapping from names to values, got {values!r}. Write "
                "`opt.with_hyperparams(learning_rate=1e-4)`."
            )
        check_readable(self)
        named = {**(values or {}), **named}
        transform = replace(self.transform, named, replace_schedules, jnp.shape(self.count))
        return self._with_arrays(self.arrays._replace(transform=pack(transform)))

    # --- state ------------------------------------------------------------------------------

    @advise_positions("The optimizer does not hold the model: write `opt.reset(model)`.")
    def reset(self, model: PyTree, where: WhereLike | None = None) -> "Optimizer":
        """Reinitializes the state of some parameters.

        Their moments and bias corrections start from scratch, and with all parameters also the
        statistics of losses and norms. The state of the other parameters, the step count and the
        hyperparameters do not change. The first step after resetting only some of the parameters
        recompiles, because each parameter then has its own age.

        **Arguments:**

        - `model`: the bound model.
        - `where`: which parameters to reset: a selector, a function or a tree of bools. Defaults
            to all.

        **Returns:** a new optimizer.

        **Raises:** `ValueError` for a path that matches nothing, or if parameters share state, as
        under `.flatten()`.
        """
        check_arrays(self)
        check_one_run(self.count, "opt.reset(model)")
        params = self._split(model).params
        chosen = paths = leaf_paths(params)
        if where is not None:
            check_matches(as_where(where), params)
            keep = mask(as_where(where), params)
            chosen = [path for path, k in zip(paths, keep, strict=True) if k]
        fresh = init_state(self.transform, jax.tree.map(strong, params))
        state = reset(self.transform, self.state, fresh, params, chosen)
        return self._with(state, self.count, params, self.binding.sharding)

    @advise_positions("Write `opt, report = opt.rebind(model, tx=tx)`.")
    def rebind(
        self,
        model: PyTree,
        *,
        tx: AbstractTransform[Any] | None = None,
        trainable: WhereLike | AsBefore | None = AS_BEFORE,
        rows: Mapping[Any, Any] | None = None,
    ) -> "tuple[Optimizer, Rebinding]":
        """Transfers the state to another model, other trainable parameters or another transform.

        All state whose path still exists is kept, and so is the step count. New parameters have a
        bias correction of their own. Schedules inside a new wrapper with a clock of its own,
        such as `.every_k` or `.if_finite`, go on where they were.

        Given only a model with the same parameters, their values may be new, as after loading
        weights. Copies of the parameters then start again from these values: the slow weights of
        `.lookahead`, the average of `.average`, the start of DoG, and the statistics beside them.
        With another argument or other parameters the run goes on, and copies are kept.

        ```python
        >>> model = {"body": jnp.ones(2), "head": jnp.ones(1)}
        >>> opt = sl.Optimizer(sl.adam(1e-3), model, trainable=sl.where.path("head"))
        >>> opt, report = opt.rebind(model, trainable=None)
        >>> report
        carried:  scale_by_adam.age, scale_by_adam.mu.head, scale_by_adam.nu.head
        new:      scale_by_adam.mu.body, scale_by_adam.nu.body
        reshaped: –
        dropped:  –

        ```

        **Arguments:**

        - `model`: the model to bind.
        - `tx`: the new transform. Defaults to this optimizer's transform with its current
            hyperparameters. A transform that was wrapped, moved or chained with others keeps its
            state. A different rule in its place keeps the momentum `mu` if it needs no bias
            correction, as in `lion`.
        - `trainable`: as in `Optimizer`. Defaults to this optimizer's.
        - `rows`: where the rows of parameters come from, as a mapping from selectors to indices:
            `{sl.where.path("embedding.weight"): index}`. `index[i]` is the old row that is row `i`
            now, and −1 makes a new one. A mapping from axes to indices, such as `{1: index}`, moves
            other entries than rows. Moments and other state with the axes of the parameter move
            with it. New rows have the initial state, but a mean of squares whose bias is corrected
            starts at the mean of the rows that stay, because all rows share one age. State with
            axes of its own, as in Shampoo, SOAP and L-BFGS, starts anew.

        **Returns:** the new optimizer, and a report of the paths that were carried over, new,
        reshaped or dropped.

        **Raises:** `ValueError` or `TypeError` for an index that does not fit its parameter.
        """
        check_arrays(self)
        check_one_run(self.count, "opt.rebind(model)[0]")
        goes_on = not (trainable is AS_BEFORE and tx is None and rows is None)
        if trainable is AS_BEFORE:
            trainable = self.binding.trainable
        new = Optimizer(self.transform if tx is None else tx, model, trainable=trainable)
        params = split(model, new.binding.trainable).params
        moved = {} if rows is None else rows_of(rows, params, self.binding.paths)
        state, report = carry(self, new, moved, goes_on=goes_on)
        new = new._with(state, jnp.copy(self.count), params, self.binding.sharding)
        return Rebound(new, report)

    @advise_positions("Write `opt, report = opt.shard_state(mesh)`.")
    def shard_state(self, mesh: Mesh, axis: str = "data") -> "tuple[Optimizer, ShardedState]":
        """Partitions the state over a mesh axis along which the parameters are replicated (ZeRO-1).

        Each parameter-shaped array, such as a moment, is partitioned along its largest dimension
        that is divisible by the size of the axis and not partitioned yet. Each device then updates
        its part of every parameter, and gathers the rest. Steps compute the same as before, and
        keep these shardings even inside your own `jit`.

        ```python
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> opt = sl.Optimizer(sl.adam(1e-3), {"w": jnp.ones((8, 4))})
        >>> opt, report = opt.shard_state(mesh)

        ```

        **Arguments:**

        - `mesh`: the mesh that the model is on, with automatic axes. Put the model on it first:
            `eqx.filter_shard(model, NamedSharding(mesh, PartitionSpec()))` replicates it.
        - `axis`: the name of the mesh axis, over which the batch is usually partitioned too.

        **Returns:** the new optimizer, and a report of the arrays that were partitioned, of those
        that stayed whole because they are not divisible, and of the bytes per device.

        **Raises:** `ValueError` for an unknown axis, or a mesh with explicit axes.

        ??? cite "Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), 2020"
        """
        check_one_run(self.count, "opt.shard_state(mesh)")
        return shard(self, mesh, axis, {})

    def _with(
        self, state: Any, count: Any, params: PyTree, sharding: StateSharding | None
    ) -> "Optimizer":
        """This optimizer with another state, which is partitioned as in another sharding."""
        parts = Arrays(self.transform, state, count)
        arrays, binding = bind(parts, params, self.binding.trainable)
        # Programs with functions of the user live as long as those of this optimizer.
        binding = dataclasses.replace(binding, source=self.binding.source)
        opt = Optimizer._from_fields(arrays, binding)
        if sharding is not None and sharding.axis is not None:
            opt, _ = shard(opt, sharding.mesh, sharding.axis, by_path(params))
        return opt


def _keywords(*values: Any) -> dict[str, Any]:
    """The keywords of `step` and `update`, in order, as entries of the context."""
    *always, extra = values
    return as_keywords(dict(zip(KEYWORDS, always, strict=True)) | extra)
