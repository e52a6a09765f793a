"""Splits a whole model into its trainable parameters and the rest."""

import sys
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import tree
from ..._core.text.messages import warn
from ...tree.paths import dotted, example, first_difference, leaf_paths
from ...tree.sharding import to_device, to_memory_of
from ...tree.types import Params, PyTree, Tracer, Updates, is_function, is_state
from ...where.masks import Unmarked, check_matches, mask
from ...where.resolve import Where
from ...where.selectors import everything

Model = TypeVar("Model")


class Split(NamedTuple):
    """The leaves of a model, and which of them are trainable.

    The arrays of an `eqx.nn.State` or an `eqx.nn.StateIndex` are never trainable, so each of these
    counts as one leaf.
    """

    leaves: list[Any]
    structure: Any
    trainable: tuple[bool, ...]
    params: Params
    """The model with `None` in place of everything that is not trainable."""

    @property
    def paths(self) -> list[str]:
        """The dotted name of each leaf."""
        return leaf_paths(example(self.structure))

    @property
    def marked(self) -> list[bool]:
        """Whether the model itself marks each leaf as not trainable."""
        inexact = tuple(map(tree.is_inexact, self.leaves))
        chosen = iter(mask(Unmarked(), _with_holes(self.structure, self.leaves, inexact)))
        return [i and not next(chosen) for i in inexact]

    def join(self, params: PyTree) -> Any:
        """The model with other trainable leaves, from a tree like `params` or a list; all others
        are the same objects."""
        new = iter(jax.tree.leaves(params))
        return self.structure.unflatten(
            [next(new) if t else x for x, t in zip(self.leaves, self.trainable, strict=True)]
        )

    @property
    def flags(self) -> PyTree:
        """Whether each leaf is trainable, as a prefix of the model."""
        return self.structure.unflatten(self.trainable)

    def align(
        self, grads: PyTree, name: str = "the gradients", *, examples: bool = False
    ) -> Updates:
        """Gradients as a tree like `params`. Raises an error if they do not match.

        With `examples`, each must have an additional leading axis.
        """
        leaves = _flatten_up_to(self.structure, grads)
        if leaves is None:
            raise self._not_alike(grads, name)
        for i, g in enumerate(leaves):
            p = self.leaves[i]
            if self.trainable[i]:
                self._check_gradient(i, g, examples)
            elif isinstance(p, float | complex) and g is not None:
                raise TypeError(
                    f"There is a gradient at '{self.paths[i]}', but the parameter is the Python "
                    f"number {p!r}, and only arrays are trained. Write `jnp.asarray({p!r})` in the "
                    "model."
                )
        if examples:
            _check_examples(self.paths, leaves, self.trainable)
        return _with_holes(self.structure, leaves, self.trainable)

    def _check_gradient(self, i: int, grad: Any, examples: bool) -> None:
        # Paths are only needed for messages, and cost more than all else here.
        param = self.leaves[i]
        if grad is None:
            raise ValueError(
                f"The gradient at '{self.paths[i]}' is None, but this parameter is trainable. To "
                "freeze it, use `sl.Optimizer(tx, model, trainable=~sl.where.path("
                f"{self.paths[i]!r}))`. To train it, differentiate with respect to it too."
            )
        if not tree.is_inexact(grad):
            kind = f"an array of dtype {grad.dtype}" if tree.is_array(grad) else type(grad).__name__
            raise TypeError(
                f"The gradient at '{self.paths[i]}' must be a floating or complex array, got "
                f"{kind}.{' Convert it: `jnp.asarray(tensor.numpy())`.' * _of_pytorch(grad)}"
            )
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise TypeError(
                f"The gradient at '{self.paths[i]}' has dtype {grad.dtype}, but the parameter has "
                f"dtype {param.dtype}. Pass the real part of the gradient."
            )
        if examples:
            if np.ndim(grad) == 0 or np.shape(grad)[1:] != np.shape(param):
                wanted = ", ".join(map(str, ("examples", *np.shape(param))))
                raise ValueError(
                    f"The gradient at '{self.paths[i]}' has shape {np.shape(grad)}, but the first "
                    f"link needs per-example gradients of shape ({wanted}). Compute them with "
                    "`jax.vmap(jax.grad(loss), in_axes=(None, 0))`, or use `sl.train_step`."
                )
            return
        if np.shape(grad) != np.shape(param):
            raise ValueError(
                f"The gradient at '{self.paths[i]}' has shape {np.shape(grad)}, but the parameter "
                f"has shape {np.shape(param)}. Gradients are not broadcast, so the shapes must be "
                "equal. If there is a batch axis, average over it first."
            )

    def _not_alike(self, grads: PyTree, name: str) -> Exception:
        """The error for gradients that are no tree like the model."""
        alone = jax.tree_util.all_leaves([grads])
        if alone and (is_function(grads) or np.ndim(grads) == 0):
            kind = "a function" if is_function(grads) else "a scalar, such as a loss"
            return TypeError(
                f"`opt.step` takes the gradients of the loss, got {kind}. Write `grads = "
                "eqx.filter_grad(loss_fn)(model, x, y)`, or let `sl.train_step(loss_fn)` "
                "differentiate."
            )
        capitalized = f"{name[0].upper()}{name[1:]}"
        if isinstance(grads, tuple) and any(_flatten_up_to(self.structure, part) for part in grads):
            return ValueError(
                f"{capitalized} must be a tree like the model, got a tuple with such a tree in it. "
                "Unpack it, as in `loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)`."
            )
        differ = first_difference(grads, self.params, (name, "the model"))
        has_others = not all(map(tree.is_array, jax.tree.leaves(grads)))
        if name == "the gradients" and has_others and all(map(tree.is_array, self.leaves)):
            return ValueError(
                f"The model and its gradients are swapped: {differ}. The model comes first: "
                "`opt.step(model, grads)`."
            )
        verb = "do" if name.endswith("s") else "does"
        return ValueError(
            f"{capitalized} {verb} not have the structure of the model: {differ}. Differentiate "
            "with respect to the model that you pass, for example with "
            "`eqx.filter_grad(loss)(model)`."
        )


def _flatten_up_to(structure: Any, tree: PyTree) -> list[Any] | None:
    """The leaves of a tree of this structure; `None` for another one."""
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError):
        return None


def _check_examples(paths: list[str], leaves: list[Any], trainable: tuple[bool, ...]) -> None:
    """Raises an error for gradients with different numbers of examples."""
    sizes = {path: g.shape[0] for path, g, t in zip(paths, leaves, trainable, strict=True) if t}
    first = next(iter(sizes), "")
    for path, size in sizes.items():
        if size != sizes[first]:
            raise ValueError(
                f"The gradient at '{path}' has {size} examples, but the gradient at '{first}' has "
                f"{sizes[first]}. Per-example gradients must all come from one batch."
            )


def split(model: PyTree, trainable: Where | None) -> Split:
    """Splits a model.

    Its inexact arrays are trainable, except for those that it marks as frozen, or those of them
    that are selected.
    """
    leaves, structure = jax.tree.flatten(model, is_leaf=is_state)
    inexact = tuple(map(eqx.is_inexact_array, leaves))
    where = Unmarked() if trainable is None else trainable
    chosen = iter(mask(where, _with_holes(structure, leaves, inexact)))
    is_trainable = tuple(i and next(chosen) for i in inexact)
    return Split(leaves, structure, is_trainable, _with_holes(structure, leaves, is_trainable))


def _with_holes(structure: Any, leaves: list[Any], keep: tuple[bool, ...]) -> PyTree:
    """A tree with `None` in place of the leaves that are not kept."""
    return structure.unflatten([x if k else None for x, k in zip(leaves, keep, strict=True)])


def _of_pytorch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch"


def checked_split(model: PyTree, trainable: Where | None) -> Split:
    """Splits a model. Raises an error for one that cannot be trained as expected."""
    parts = split(model, trainable)
    for i, x in enumerate(parts.leaves):
        if _of_pytorch(x):
            where = f"contains at '{parts.paths[i]}'" if parts.paths[i] else "is"
            raise TypeError(
                f"The model {where} a {type(x).__name__} of PyTorch. Write the model with Equinox, "
                "and convert tensors: `jnp.asarray(tensor.numpy())`."
            )
        if tree.is_inexact(x) and not eqx.is_inexact_array(x):
            raise TypeError(
                f"The leaf '{parts.paths[i]}' is a NumPy array of dtype {x.dtype}, which Equinox "
                "does not treat as a floating array, so it would never be trained. Replace it "
                "with `jnp.asarray(leaf)`."
            )
    if trainable is not None:
        check_matches(trainable, split(model, everything()).params)
    else:
        _refuse_numbers(model)
        _refuse_variables(model)
    if not any(parts.trainable):
        kinds = sorted({_kind(x) for x in parts.leaves}) or ["no leaves"]
        but = " that `trainable` selects" if trainable is not None else " that it does not mark"
        but = but if any(split(model, everything()).trainable) else ""
        raise ValueError(
            "There is nothing to train: the model has no floating or complex arrays"
            f"{but}. It contains {', '.join(kinds)}."
        )
    _refuse_equal_paths(parts)
    _warn_tied(parts)
    return parts


def _refuse_variables(model: PyTree) -> None:
    """Raises an error for variables of Flax that a call of the model changes."""
    nnx = sys.modules.get("flax.nnx")
    variable, param = (getattr(nnx, name, ()) for name in ("Variable", "Param"))
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, variable))
    for path, x in leaves:
        if isinstance(x, variable) and not isinstance(x, param):
            raise TypeError(
                f"'{dotted(path)}' is an `nnx.{type(x).__name__}`, which calls of the model "
                "change, and a step would train it or lose the change. Pass the transform to Flax: "
                "`nnx.Optimizer(model, sl.interop.to_optax(tx), wrt=nnx.Param)`. Or bind the "
                "parameters alone: `graph, params, rest = nnx.split(model, nnx.Param, ...)`."
            )


def _refuse_numbers(model: PyTree) -> None:
    """Raises an error for a Python number where all others are parameters.

    A module has numbers that are not trained, such as a dropout rate, and so has a tree with
    functions, strings or ints in it.
    """

    def is_module(x: Any) -> bool:
        return isinstance(x, eqx.Module)

    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_module)
    outside = [(path, x) for path, x in leaves if not is_module(x)]
    if not all(tree.is_inexact(x) or isinstance(x, float | complex) for _, x in outside):
        return
    for path, x in outside:
        if not tree.is_inexact(x):
            raise TypeError(
                f"The parameter '{dotted(path)}' is the Python number {x!r}, and only arrays are "
                f"trained. Write `jnp.asarray({x!r})`. If it is no parameter, keep it elsewhere, "
                "or write `trainable=sl.where.everything()`, which trains all arrays."
            )


def _refuse_equal_paths(parts: Split) -> None:
    """Raises an error for two arrays of one name, by which their state could not be told apart."""
    seen: set[str] = set()
    for path, x in zip(parts.paths, parts.leaves, strict=True):
        if path in seen and tree.is_array(x):
            raise ValueError(
                f"Two arrays of the model have the path '{path}', because a key contains a dot. "
                "Rename one of them: states, selectors and checkpoints use the paths."
            )
        seen.add(path)


def _warn_tied(parts: Split) -> None:
    first: dict[int, int] = {}
    for i, (x, is_trainable) in enumerate(zip(parts.leaves, parts.trainable, strict=True)):
        if not is_trainable or isinstance(x, Tracer):
            continue
        earlier = first.setdefault(id(x), i)
        if earlier != i:
            warn(
                f"The model contains the same array twice, at '{parts.paths[earlier]}' and "
                f"'{parts.paths[i]}'. They are trained as two separate parameters. To tie them, "
                "use `eqx.nn.Shared`."
            )


def _kind(x: Any) -> str:
    return f"{x.dtype} arrays" if tree.is_array(x) else f"leaves of type {type(x).__name__}"


def check_bound(params: Params, bound: Any) -> None:
    """Raises an error for a model whose trainable parameters differ from those at binding."""
    structure = jax.tree.structure(params)
    if structure != bound:
        names = ("this model", "the original model")
        differ = first_difference(params, example(bound), names)
        raise ValueError(
            "The trainable parameters of this model differ from those that the optimizer was "
            f"created with: {differ}. Create a new optimizer with `sl.Optimizer(tx, model)`, or "
            "transfer the state with `opt.rebind(model)`."
        )


def strong(model_leaf: Any) -> Any:
    """The leaf, with a strong type if it is a weakly typed array."""
    if getattr(model_leaf, "weak_type", False):
        return jnp.asarray(model_leaf, model_leaf.dtype)
    return model_leaf


def apply_updates(model: Model, updates: PyTree) -> Model:
    """Adds updates to a model.

    **Arguments:**

    - `model`: any tree. Leaves whose update is `None` are returned as they are.
    - `updates`: the updates that `opt.update` or `tx.update` returned: arrays with the shapes of
        the parameters, and `None` for all other leaves.

    **Returns:** the new model, with unchanged dtypes.

    ```python
    >>> sl.apply_updates({"w": jnp.ones(2), "name": "net"}, {"w": jnp.ones(2), "name": None})
    {'name': 'net', 'w': Array([2., 2.], dtype=float32)}

    ```
    """
    leaves, structure = jax.tree.flatten(model, is_leaf=is_state)
    changes = _flatten_up_to(structure, updates)
    if changes is None:
        differ = first_difference(updates, model, ("the updates", "the model"))
        raise ValueError(f"The updates do not have the structure of the model: {differ}.")
    # Filters keep the arrays of an `eqx.nn.State`, which are no parameters.
    changes = [None if is_state(x) else u for x, u in zip(leaves, changes, strict=True)]
    changed = tuple(u is not None for u in changes)
    params = _with_holes(structure, leaves, changed)
    added = tree.add(to_device(params), to_device(structure.unflatten(changes)))
    return Split(leaves, structure, changed, params).join(to_memory_of(params, added))
