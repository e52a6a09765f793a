"""From a whole model to its trainable parameters and back."""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import tree
from .._core.messages import warn
from .._paths import dotted, example, first_difference, leaf_paths
from .._types import Params, Tracer, Updates
from ..where.resolve import Where, check_matches, mask

Model = TypeVar("Model")


class Split(NamedTuple):
    """A model taken apart: its leaves, and which of them are trained.

    The contents of an `eqx.nn.StateIndex` belong to `eqx.nn.State` and are never trained, so
    such an index counts as one leaf.
    """

    leaves: list[Any]
    structure: Any
    trained: tuple[bool, ...]

    @property
    def params(self) -> Params:
        """The model with holes at everything that is not trained."""
        return self.structure.unflatten(
            [x if t else None for x, t in zip(self.leaves, self.trained, strict=True)]
        )

    @property
    def paths(self) -> list[str]:
        """The dotted name of each leaf."""
        return leaf_paths(example(self.structure))

    def join(self, trained: list[Any]) -> Any:
        """The model with these arrays as its trained leaves; everything else is the very object."""
        new = iter(trained)
        return self.structure.unflatten(
            [next(new) if t else x for x, t in zip(self.leaves, self.trained, strict=True)]
        )

    def flags(self, model: PyTree) -> PyTree:
        """The model with a bool at each leaf: whether it is trained."""
        flags = self.structure.unflatten(self.trained)
        return jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), flags, model)

    def align(
        self, grads: PyTree, name: str = "the gradients", *, examples: bool = False
    ) -> Updates:
        """Gradients as a tree with the parameters' holes; refused where they do not fit.

        With `examples` they must have one more axis than the parameters, in front.
        """
        try:
            leaves = self.structure.flatten_up_to(grads)
        except (ValueError, TypeError):
            verb = "have" if name.endswith("s") else "has"
            differ = first_difference(grads, self.params, (name, "the model"))
            swapped = all(tree.is_array(x) for x in self.leaves) and not all(
                tree.is_array(x) for x in jax.tree.leaves(grads)
            )
            if swapped and name == "the gradients":
                raise ValueError(
                    f"The model and its gradients are swapped: {differ}. The model comes first: "
                    "`opt.step(model, grads)`."
                ) from None
            raise ValueError(
                f"{name[0].upper()}{name[1:]} {verb} another structure than the model: {differ}. "
                "Differentiate the same model that you pass, for example with "
                "`eqx.filter_grad(loss)(model)`."
            ) from None
        for path, g, p, trained in zip(self.paths, leaves, self.leaves, self.trained, strict=True):
            if trained:
                _check_gradient(path, g, p, examples)
        if examples:
            _check_examples(self.paths, leaves, self.trained)
        return self.structure.unflatten(
            [g if t else None for g, t in zip(leaves, self.trained, strict=True)]
        )


def _check_gradient(path: str, grad: Any, param: Any, examples: bool) -> None:
    if grad is None:
        raise ValueError(
            f"The gradient at '{path}' is None, but the parameter there is trainable. Either it "
            "was frozen while differentiating: then bind with "
            f"`sl.Optimizer(tx, model, trainable=~sl.where.path({path!r}))`; or differentiate it "
            "too."
        )
    if not tree.is_inexact(grad):
        kind = f"an array of dtype {grad.dtype}" if tree.is_array(grad) else type(grad).__name__
        raise TypeError(
            f"The gradient at '{path}' must be a floating or complex array, got {kind}."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
        raise TypeError(
            f"The gradient at '{path}' is {grad.dtype}, but the parameter there is {param.dtype}. "
            "Pass its real part."
        )
    if examples:
        if np.ndim(grad) == 0 or np.shape(grad)[1:] != np.shape(param):
            wanted = ", ".join(map(str, ("examples", *np.shape(param))))
            raise ValueError(
                f"The gradient at '{path}' has shape {np.shape(grad)}, but the first link takes a "
                f"gradient for each example: shape ({wanted}). Differentiate each example by "
                "itself, as `jax.vmap(jax.grad(loss), in_axes=(None, 0))` and `sl.train_step` do."
            )
        return
    if np.shape(grad) != np.shape(param):
        raise ValueError(
            f"The gradient at '{path}' has shape {np.shape(grad)}, but the parameter there has "
            f"shape {np.shape(param)}. Shapes must be equal: nothing is broadcast. Average over "
            "a batch axis before the step."
        )


def _check_examples(paths: list[str], leaves: list[Any], trained: tuple[bool, ...]) -> None:
    """Refuses gradients that are of different numbers of examples."""
    sizes = {path: g.shape[0] for path, g, t in zip(paths, leaves, trained, strict=True) if t}
    first = next(iter(sizes), "")
    for path, size in sizes.items():
        if size != sizes[first]:
            raise ValueError(
                f"The gradient at '{path}' is of {size} examples and that at '{first}' of "
                f"{sizes[first]}. The first link takes a gradient for each example of one batch."
            )


def split(model: PyTree, trainable: Where | None) -> Split:
    """Takes a model apart. Trained are its inexact arrays, narrowed by `trainable`."""
    leaves, structure = jax.tree.flatten(model, is_leaf=_is_state_index)
    inexact = [tree.is_inexact(x) and not _overlooked(x) for x in leaves]
    if trainable is None:
        return Split(leaves, structure, tuple(inexact))
    params = Split(leaves, structure, tuple(inexact)).params
    chosen = iter(mask(trainable, params))
    return Split(leaves, structure, tuple(i and next(chosen) for i in inexact))


def check_model(model: PyTree, trainable: Where | None) -> None:
    """Refuses, at binding, a model that could not be trained as its owner believes."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_state_index)
    for path, x in leaves:
        if _overlooked(x):
            raise TypeError(
                f"The leaf '{dotted(path)}' is a NumPy array of dtype {x.dtype}, which Equinox "
                "does not see as a floating array: it would get no gradient and never be "
                "trained. Pass `jnp.asarray(leaf)` in its place."
            )
    if trainable is not None:
        check_matches(trainable, split(model, None).params)
    parts = split(model, trainable)
    if not any(parts.trained):
        kinds = sorted({_kind(x) for _, x in leaves}) or ["no leaf at all"]
        because = "none that `trainable` selects" if any(split(model, None).trained) else "none"
        raise ValueError(
            "There is no parameter to train: parameters are floating or complex arrays, and the "
            f"model holds {because}. It holds: {', '.join(kinds)}."
        )
    _warn_tied(parts)


def _warn_tied(parts: Split) -> None:
    first: dict[int, str] = {}
    for path, x, trained in zip(parts.paths, parts.leaves, parts.trained, strict=True):
        if not trained or isinstance(x, Tracer):
            continue
        if id(x) in first:
            warn(
                f"One array stands at two places of the model, '{first[id(x)]}' and '{path}'. "
                "They are trained as two parameters and will drift apart. To tie them, make one "
                "a reference to the other with `eqx.nn.Shared`."
            )
        first[id(x)] = path


def _overlooked(x: Any) -> bool:
    """Whether a leaf is a floating array to JAX but not to Equinox: NumPy's bfloat16 and such."""
    return tree.is_inexact(x) and not eqx.is_inexact_array(x)


def _is_state_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)


def _kind(x: Any) -> str:
    return f"{x.dtype} arrays" if tree.is_array(x) else f"leaves of type {type(x).__name__}"


def check_bound(params: Params, bound: Any) -> None:
    """Refuses a model whose trainable parameters are not where they were at binding."""
    structure = jax.tree.structure(params)
    if structure != bound:
        names = ("the model given now", "the model at binding")
        differ = first_difference(params, example(bound), names)
        raise ValueError(
            f"This optimizer was bound to a model with other trainable parameters: {differ}. Bind "
            "a new one with `sl.Optimizer(tx, model)`."
        )


def strong(model_leaf: Any) -> Any:
    """A weakly typed array made strong; anything else as it is."""
    if getattr(model_leaf, "weak_type", False):
        return jnp.asarray(model_leaf, model_leaf.dtype)
    return model_leaf


def apply_updates(model: Model, updates: PyTree) -> Model:
    """Adds updates to a model.

    **Arguments:**

    - `model`: any tree; everything at which the updates have a hole stays the very object.
    - `updates`: what `opt.update` or `tx.update` returned: arrays shaped as the parameters, and
        `None` elsewhere.

    **Returns:** the model, every leaf in its own dtype.

    ```python
    >>> sl.apply_updates({"w": jnp.ones(2), "name": "net"}, {"w": jnp.ones(2), "name": None})
    {'name': 'net', 'w': Array([2., 2.], dtype=float32)}

    ```
    """
    leaves, structure = jax.tree.flatten(model, is_leaf=_is_state_index)
    try:
        given = structure.flatten_up_to(updates)
    except (ValueError, TypeError):
        differ = first_difference(updates, model, ("the updates", "the model"))
        raise ValueError(f"The updates have another structure than the model: {differ}.") from None
    parts = Split(leaves, structure, tuple(u is not None for u in given))
    added = tree.add(parts.params, structure.unflatten(given))
    return parts.join(jax.tree.leaves(added))
