"""Saves trees, and the layouts of optimizers, to one file."""

import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._core.text.messages import PACKAGE, advise_positions
from .._loop.binding.optimizer import Optimizer
from .._loop.programs.compiled import check_readable
from ..tree.types import PyTree
from . import _file
from ._layouts import layout_of, layout_to_json
from ._leaves import NUMBERS, check_savable, nodes, saved_leaves, to_host
from ._saving import Saving, settle

_RESERVED = ("path", "background", "strict", "hyperparams")


@advise_positions(
    "Write `sl.checkpoint.save(path, model=model, opt=opt)`, with names for all but the path."
)
def save(
    path: str | os.PathLike[str],
    *,
    model: PyTree = None,
    opt: PyTree = None,
    background: bool = False,
    **more: PyTree,
) -> Saving:
    """Saves a model, an optimizer and anything else to one file.

    The file has the format safetensors, and its arrays have the names that the library uses
    everywhere, such as `model.layers.0.weight` and `opt.scale_by_adam.mu.layers.0.weight`. Its
    header is text: versions, the step count, the printed optimizer and checksums. It is written
    next to `path`, synced and then renamed, so a process that is killed at any moment leaves the
    old file or the new one.

    ```python
    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/run.safetensors"
    >>> model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.adam(1e-3), model)
    >>> saving = sl.checkpoint.save(path, model=model, opt=opt, epoch=3)
    >>> sl.checkpoint.load(path, model=model, opt=opt, epoch=0)["epoch"]
    3

    ```

    **Arguments:**

    - `path`: the file. Missing directories are made.
    - `model`: any tree. All its arrays are saved, including frozen ones and PRNG keys. Its Python
        numbers, such as a dropout rate, are not: they belong to the program.
    - `opt`: an optimizer, or a tree of optimizers.
    - `background`: whether to return as soon as all arrays are copied to the host, and to write
        the file while training goes on. An error is raised by `.wait()` of the result, by the next
        save to the same directory, or printed when the program ends.
    - `more`: other trees by name, such as an `eqx.nn.State`, a key or the position of a data
        loader. Their Python numbers and strings are saved too. Functions are not: they belong to
        the program.

    **Returns:** a `Saving`, whose `.wait()` waits for a file that is written in the background.

    **Raises:** `OSError` if the file cannot be written; `ValueError` or `TypeError` for values that
    cannot be saved, such as bytes or a set, with a way to save them. The old file is intact.
    """
    return start(Path(path), given(model, opt, more), background, lambda: None)


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

    **Returns:** a flat dict of the arrays of the trees, with their shardings.
    """
    trees = given(model, opt, more)
    return {name: leaf for root, x in trees.items() for name, leaf in saved_leaves(root, x).items()}


def given(model: PyTree, opt: PyTree, more: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The trees that were passed, by keyword."""
    trees = {"model": model, "opt": opt, **more}
    trees = {name: x for name, x in trees.items() if x is not None}
    for name in trees:
        if name in _RESERVED:
            raise TypeError(f"'{name}' names an option. Choose another name for this tree.")
        if not name or "." in name:
            raise ValueError(
                f"A tree cannot have the name {name!r}: names must not be empty, and must not have "
                "dots, which join the parts of a path."
            )
        _file.check_name(name)
    if not trees:
        raise TypeError("There is nothing to save or load: pass `model=model, opt=opt`.")
    return trees


def start(
    path: Path, trees: Mapping[str, PyTree], background: bool, then: Callable[[], None]
) -> Saving:
    """Saves trees and then does something else, in the background or not."""
    # Joined to the current directory now: it may be another one when the file is written.
    path = Path(os.path.abspath(path))
    settle(path)
    leaves, values, layouts = {}, {}, {}
    for root, given in trees.items():
        for place, node in nodes(root, given):
            if isinstance(node, Optimizer):
                check_readable(node)
                layouts[place] = node
        for name, leaf in saved_leaves(root, given).items():
            (values if type(leaf) in NUMBERS else leaves)[name] = leaf
    for name in (*leaves, *values):
        _file.check_name(name)
    check_savable(leaves)
    arrays, dtypes = to_host(leaves, copy=background)
    header = _header(trees, layouts)
    write = functools.partial(
        _file.write, path, arrays, dtypes=dtypes, values=values, header=header
    )

    def work() -> None:
        write()
        then()

    return Saving(path, work, background)


def _header(trees: Mapping[str, PyTree], optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """The readable part of the header, and the layouts of the optimizers."""
    slalom = sys.modules[PACKAGE].__version__
    libraries = {name: importlib.metadata.version(name) for name in ("jax", "equinox", "numpy")}
    versions = {PACKAGE: slalom, **libraries, "python": platform.python_version()}
    single = len(optimizers) == 1

    def text(of: Callable[[Optimizer], str]) -> str:
        return "\n".join(
            (of(x) if single else f"{path}: {of(x)}") for path, x in optimizers.items()
        )

    return {
        "trees": json.dumps(list(trees)),
        "versions": json.dumps(versions),
        "count": text(lambda opt: str(opt.count.tolist())),
        "optimizer": text(repr),
        "layouts": json.dumps({p: layout_to_json(layout_of(x, "")) for p, x in optimizers.items()}),
    }
