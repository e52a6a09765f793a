"""The optimizer: a transform, its state and a clock, bound to one model's parameters."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .. import tree
from .._compile.program import Program
from .._core.by_path import ByPath
from .._core.context import Context
from .._core.hyperparams import bound, read, replace
from .._core.printing import AbstractPrinted, Call
from .._core.slots import reset
from .._core.transform import AbstractTransform
from .._core.walk import find, transforms
from .._core.write import ADD, RETURN, Write
from .._core.writer import params_to_evaluate
from .._paths import example, leaf_paths
from .._suggest import no_attribute
from .._types import Tracer, Updates
from ..where.resolve import WhereLike, as_where, check_matches, mask
from .arrays import Arrays
from .binding import Binding, at_home, bind, check_transform, no_transform
from .describe import Description, describe, metrics, summary
from .model import Split, check_bound, check_model, split, strong
from .rebind import Rebinding, carry
from .step import KNOWN, as_known, check_one_run, run


class Optimizer(AbstractPrinted):
    """A transform bound to a model: it holds the state, and gives each step a new optimizer.

    ```python
    >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.adam(1e-3), model)
    >>> grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    >>> model, opt = opt.step(model, grads)

    ```

    An optimizer is immutable, and every leaf of it is a JAX array: it can be a `scan` carry, go
    through plain `jax.jit`, be `vmap`ped over its hyperparameters, differentiated and saved.
    """

    arrays: Arrays

    def __init__(
        self,
        transform: AbstractTransform,
        model: PyTree,
        *,
        trainable: WhereLike | None = None,
        hyperparam_dtype: Any | None = None,
    ):
        """Binds a transform to a model.

        **Arguments:**

        - `transform`: the rule. Its numbers become 0-d arrays: float32 (float64 under x64), or
            the dtype of the array that was given.
        - `model`: any tree: a module with functions and ints inside, a dict of arrays, a tuple
            of models. It is looked at, not kept.
        - `trainable`: which of its floating and complex arrays are trained: a selector, a
            function or a tree of bools; all of them without it. The others get no state, no
            decay and no share in norms, and keep every bit.
        - `hyperparam_dtype`: the dtype of all hyperparameters.
        """
        if not isinstance(transform, AbstractTransform):
            raise TypeError(no_transform(transform, model))
        where = None if trainable is None else as_where(trainable)
        check_model(model, where)
        params = jax.tree.map(strong, split(model, where).params)
        check_transform(transform, params)
        transform = bound(transform, hyperparam_dtype)
        made = (transform, (transform.init(params), tree.fresh_count()))
        leaves, binding = bind(at_home(made, params), where, jax.tree.structure(params))
        self.arrays = Arrays(leaves, binding)

    if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

        def __getattr__(self, name: str) -> Any:
            own = vars(Optimizer).get(name)
            if isinstance(own, property):
                return own.fget(self)  # for the error inside of it, which brought Python here
            raise no_attribute(Optimizer, name)

    # --- parts ------------------------------------------------------------------------------

    @property
    def binding(self) -> Binding:
        """What the optimizer holds beside its arrays."""
        return self.arrays.binding

    @property
    def transform(self) -> AbstractTransform:
        """The rule, its numbers as arrays."""
        return self._tree[0]

    @property
    def state(self) -> Any:
        """What the rule remembers."""
        return self._tree[1][0]

    @property
    def count(self) -> Int[Array, "*runs"]:
        """How often `step` or `update` was called: the clock of the outermost transform."""
        return self._tree[1][1]

    @property
    def _tree(self) -> Any:
        leaves = list(self.arrays)
        for i, _, static in self.binding.statics:
            leaves.insert(i, static)
        return self.binding.structure.unflatten(leaves)

    def state_of(self, which: str | type[AbstractTransform]) -> Any:
        """The state of one part of the transform.

        **Arguments:**

        - `which`: its path, such as `"scale_by_adam"` or `"partition.disc.scale_by_adam"`, any
            unambiguous suffix of it, or its class.

        **Returns:** the state that this part's `init` made; an error lists the candidates.
        """
        return find(self.transform, which, self.state).state

    @property
    def has_updated(self) -> Bool[Array, "*runs"]:
        """Whether the last step wrote any parameter. Before the first step, it did not."""
        return jnp.logical_and(self.transform.has_updated(self.state), self.count > 0)

    # --- steps ------------------------------------------------------------------------------

    def step(
        self,
        model: PyTree,
        grads: PyTree,
        *,
        value: Any = None,
        grad: PyTree | None = None,
        value_fn: Callable[[PyTree], Any] | None = None,
        key: Any = None,
        weight: Any = None,
        per_param: Mapping[str, PyTree] | None = None,
        **extra: Any,
    ) -> "tuple[PyTree, Optimizer]":
        """Gradients in, model out. Compiled on first use, inlined under an outer `jit`.

        **Arguments:**

        - `model`: the model, as bound: the whole of it.
        - `grads`: its gradients, as `eqx.filter_grad` returns them: arrays, and `None` where
            nothing is trained. Complex gradients are expected conjugated: `jax.grad` gives the
            conjugate of the direction of steepest ascent. (`sl.train_step` conjugates itself.)
        - `value`, `grad`, `value_fn`: the loss, its gradient, and the loss as a function of the
            model, for transforms that need them; always welcome. A function is part of the
            program: one that is made anew for each step, such as a lambda, compiles anew. To
            pass it data, write `jax.tree_util.Partial(loss_fn, x=x)`: its arrays are traced.
        - `key`: a PRNG key for this step.
        - `weight`: how much this mini-batch counts in an accumulated mean.
        - `per_param`: trees like the parameters, by name, for transforms that need them.
        - `extra`: what a custom transform declared under `needs`.

        **Returns:** the new model, leaves in their dtypes and everything untrained the very
        object, and the new optimizer.

        **Raises:** before anything is computed: `ValueError` or `TypeError` for gradients that
        do not fit the model, another model than the bound one, something a transform needs and
        was not given, or an undeclared keyword.
        """
        check_guards(self)
        known = _given(value, grad, value_fn, key, weight, per_param, extra)
        after, _ = _step({"grads": grads, "known": known, "model": model, "opt": self})
        return after["model"], after["opt"]

    def update(
        self,
        model: PyTree,
        grads: PyTree,
        *,
        value: Any = None,
        grad: PyTree | None = None,
        value_fn: Callable[[PyTree], Any] | None = None,
        key: Any = None,
        weight: Any = None,
        per_param: Mapping[str, PyTree] | None = None,
        **extra: Any,
    ) -> "tuple[PyTree, Optimizer]":
        """Gradients in, updates out, for those who add them themselves.

        **Arguments:** as for `step`.

        **Returns:** the updates, in the parameters' dtypes and `None` where nothing is trained,
        to be added with `sl.apply_updates(model, updates)`; and the new optimizer.
        """
        check_guards(self)
        known = _given(value, grad, value_fn, key, weight, per_param, extra)
        after, updates = _update({"grads": grads, "known": known, "model": model, "opt": self})
        return updates, after["opt"]

    # --- hyperparameters --------------------------------------------------------------------

    @property
    def hyperparams(self) -> ByPath:
        """The value that the *next* step uses for each hyperparameter, by path.

        Schedules are asked on the clock of the transform they belong to. Any unambiguous suffix
        of a path works as a key: `opt.hyperparams["learning_rate"]`. An optimizer made under
        `vmap` has an array of them, with a value for each run.
        """
        if jnp.ndim(self.count):
            return jax.vmap(lambda run: run.hyperparams)(self)
        return read(self.transform, self.state, Context(step=self.count))

    def with_hyperparams(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        replace_schedules: bool = False,
        **named: Any,
    ) -> "Optimizer":
        """The optimizer with other hyperparameters. A number for a number never recompiles.

        **Arguments:**

        - `values`: new values by path: a full one, an unambiguous suffix, or a glob such as
            `"partition.disc.**.learning_rate"`, which sets every hyperparameter it matches. A
            number takes the old leaf's dtype, shape and sharding; of an optimizer made under
            `vmap` an array has one for each run. A function is applied to the old value:
            `lambda lr: lr / 2`. A schedule takes the old one's place.
        - `replace_schedules`: whether a number may take the place of a schedule. That changes
            the program: the next step recompiles, once.
        - `named`: the same as keywords: `learning_rate=1e-4`.

        **Returns:** a new optimizer; state and clock are kept.

        **Raises:** `KeyError` for a name that is unknown or ambiguous, with the candidates;
        `ValueError` for a value outside its interval.
        """
        if not isinstance(values, Mapping | None):
            raise TypeError(
                f"`with_hyperparams` takes numbers by name, got {values!r}: write "
                "`opt.with_hyperparams(learning_rate=1e-4)`."
            )
        transform = replace(self.transform, {**(values or {}), **named}, replace_schedules)
        made = (transform, (self.state, self.count))
        leaves, binding = bind(made, self.binding.trainable, self.binding.params)
        return _make(leaves, self.binding if binding == self.binding else binding)

    # --- state ------------------------------------------------------------------------------

    def reset(self, model: PyTree, where: WhereLike | None = None) -> "Optimizer":
        """The optimizer with the state of some parameters started anew.

        Their means begin again, and their bias correction with them; that of the others, the
        clock and the hyperparameters are kept. The first step after a reset of some parameters
        compiles once, since every age is then kept by itself.

        **Arguments:**

        - `model`: the bound model.
        - `where`: the parameters: a selector, a function or a tree of bools; all without it.

        **Returns:** a new optimizer.

        **Raises:** `ValueError` for a path that matches nothing, or where the state does not
        tell the parameters apart, as under `.flatten()`.
        """
        check_one_run(self.count, "reset(model)")
        params = split(model, self.binding.trainable).params
        check_bound(params, self.binding.params)
        chosen = paths = leaf_paths(params)
        if where is not None:
            check_matches(as_where(where), params)
            keep = mask(as_where(where), params)
            chosen = [path for path, k in zip(paths, keep, strict=True) if k]
        transform, (state, count) = self._tree
        fresh = transform.init(jax.tree.map(strong, params))
        state = reset(transform, state, fresh, params, chosen)
        made = at_home((transform, (state, count)), params)
        return _make(*bind(made, self.binding.trainable, self.binding.params))

    def rebind(
        self,
        model: PyTree,
        *,
        tx: AbstractTransform | None = None,
        trainable: WhereLike | None = "as before",
    ) -> "tuple[Optimizer, Rebinding]":
        """An optimizer for another model, other trained parameters or another transform.

        Every part of the state that still fits, by its path, is carried over, and the clock.
        Parameters that are new start with a bias correction of their own.

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
        - `tx`: the new transform; this optimizer's own, with its present numbers, without it.
            A rule that was wrapped, moved or joined by others keeps its state; another rule in
            its place keeps the momentum `mu` where it needs no bias correction, such as `lion`.
        - `trainable`: as for `Optimizer`; as before without it.

        **Returns:** the new optimizer, and a report of what was carried over, new, reshaped or
        dropped.
        """
        check_one_run(self.count, "rebind(model)[0]")
        if isinstance(trainable, str):
            trainable = self.binding.trainable
        new = Optimizer(self.transform if tx is None else tx, model, trainable=trainable)
        state, report = carry(
            (self.transform, self.state, example(self.binding.params)),
            (new.transform, new.state, example(new.binding.params)),
        )
        made = (new.transform, (state, jnp.copy(self.count)))
        home = at_home(made, split(model, new.binding.trainable).params)
        return _make(*bind(home, new.binding.trainable, new.binding.params)), report

    # --- what comes of it ---------------------------------------------------------------------

    def eval_params(self, model: PyTree) -> PyTree:
        """The model to evaluate, whatever the optimizer is.

        It holds the slow weights under `.lookahead`, the averages under `.average`, and is the
        model itself under a transform that keeps no other parameters.

        **Arguments:**

        - `model`: the bound model, as the last step returned it.

        **Returns:** the model, every leaf in its own dtype.
        """
        whole = split(model, self.binding.trainable)
        check_bound(whole.params, self.binding.params)
        params = params_to_evaluate(self.transform, self.state, whole.params)
        return whole.join(jax.tree.leaves(params))

    @property
    def metrics(self) -> ByPath:
        """What the transforms report of the last step: scalars by path, such as
        `if_finite.notfinite_count`. Any unambiguous suffix of a path works as a key.
        """
        return metrics(self.transform, self.state)

    # --- inspection -------------------------------------------------------------------------

    def describe(self, model: PyTree) -> Description:
        """What happens to each parameter: its group, learning rate, decay, state and transforms.

        **Arguments:**

        - `model`: the bound model.

        **Returns:** a table; `print` it, or take `.to_dict()`.
        """
        whole = split(model, self.binding.trainable)
        return describe(self.transform, self.state, self.hyperparams, whole)

    def _code(self) -> Call:
        parameters = self.binding.params.num_leaves
        return summary(self.transform, self.state, self.count, parameters, self.binding.trainable)


# --- parts --------------------------------------------------------------------------------


def _make(leaves: tuple[Any, ...], binding: Binding) -> Optimizer:
    """An optimizer from its parts. Called once a step: going through `__init__` would bind anew."""
    optimizer = object.__new__(Optimizer)
    object.__setattr__(optimizer, "arrays", Arrays(leaves, binding))
    return optimizer


def _given(*known: Any) -> dict[str, Any]:
    """The keywords of `step` and `update`, in order, as what this step knows."""
    *always, extra = known
    return as_known(dict(zip(KNOWN, always, strict=True)) | extra)


# --- the compiled step ----------------------------------------------------------------------


def check_guards(opt: Optimizer) -> None:
    """Raises where a state says that no further step may be made, if it can be read here."""
    if not opt.binding.guarded:
        return  # nothing to read, so nothing to wait for
    if any(isinstance(x, Tracer) or getattr(x, "is_deleted", bool)() for x in opt.arrays):
        return  # under an outer trace, or donated, which the step itself will refuse
    for part in transforms(opt.transform, opt.state):
        if part.module.guard is not None:
            part.module.guard(part.name, part.state)


def carried(arguments: Any, *, model: bool = True) -> Any:
    """The leaves that a step gives new values: the trained ones, the state and the count."""
    opt = arguments["opt"]
    flags = jax.tree.map(lambda _: False, arguments)
    changes = tuple(i >= opt.binding.rules for i in range(len(opt.arrays)))
    flags["opt"] = _make(changes, opt.binding)
    if model:
        flags["model"] = split(arguments["model"], opt.binding.trainable).flags(arguments["model"])
    return flags


def advance(
    opt: Optimizer,
    model: Split,
    grads: Any,
    known: Any,
    write: Write = ADD,
    transform: AbstractTransform | None = None,
) -> Any:
    """One step of an optimizer on traced arrays, as `run` says; with `transform` in place of its
    own, which has the same state."""
    own, (state, count) = opt._tree
    rule = own if transform is None else transform
    return run(write, rule, state, count, opt.binding.params, model, grads, known)


def _step_body(arguments: Any) -> tuple[list[Array], None]:
    opt, known = arguments["opt"], arguments["known"]
    model = split(arguments["model"], opt.binding.trainable)
    params, state = advance(opt, model, arguments["grads"], known)
    return jax.tree.leaves(params) + state, None


def _update_body(arguments: Any) -> tuple[list[Array], Updates]:
    opt, known = arguments["opt"], arguments["known"]
    model = split(arguments["model"], opt.binding.trainable)
    updates, state = advance(opt, model, arguments["grads"], known, RETURN)
    return state, updates


_step = Program(_step_body, carried)
_update = Program(_update_body, functools.partial(carried, model=False))
