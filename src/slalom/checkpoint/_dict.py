"""Trees as a flat dict of named arrays, for other libraries to save."""

from collections.abc import Mapping
from typing import Any

from ..tree.types import PyTree
from ._assemble import Loaded, Source, assemble
from ._leaves import is_saved, named_leaves
from ._save import given


def to_dict(*, model: PyTree = None, opt: PyTree = None, **more: PyTree) -> dict[str, Any]:
    """Everything that `save` would save, by name: for Orbax, or any other library.

    ```python
    >>> model = {"w": jnp.ones(2)}
    >>> opt = sl.Optimizer(sl.sgd(0.1), model)
    >>> list(sl.checkpoint.to_dict(model=model, opt=opt))
    ['model.w', 'opt.scale_by_learning_rate.learning_rate', 'opt.count']

    ```

    **Arguments:**

    - `model`, `opt`, `more`: trees as for `save`. Arrays may be abstract.

    **Returns:** a flat dict. The arrays are those of the trees, with their shardings.
    """
    trees = given(model, opt, more)
    named = (pair for root, x in trees.items() for pair in named_leaves(root, x))
    return {name: leaf for name, leaf in named if is_saved(name.partition(".")[0], leaf)}


def from_dict(
    items: Mapping[str, Any],
    *,
    model: PyTree = None,
    opt: PyTree = None,
    strict: bool = True,
    hyperparams: str = "program",
    **more: PyTree,
) -> Loaded:
    """The trees that `to_dict` was given, with the values of a dict.

    **Arguments:**

    - `items`: arrays, numbers and strings by name.
    - `model`, `opt`, `strict`, `hyperparams`, `more`: as for `load`. The state of optimizers is
        matched by name only.

    **Returns:** a dict with a report, as `load`. Arrays have the shardings of these trees.

    **Raises:** as `load`.
    """
    trees = given(model, opt, more)
    return assemble(Source("The dict", items, {}), trees, strict, hyperparams)
