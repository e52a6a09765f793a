"""Loads trees from one file, or from a dict."""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax

from .._core.state.slots import leaves_of
from .._core.text.messages import advise_positions
from .._loop.reports.rebind import Side
from ..tree.types import PyTree
from . import _file
from ._leaves import StateLayout, layout_from_json
from ._match import Loaded, Source, assemble
from ._save import given, settle


@advise_positions(
    "Write `sl.checkpoint.load(path, model=model, opt=opt)`, with names for all but the path."
)
def load(
    path: str | os.PathLike[str],
    *,
    model: PyTree = None,
    opt: PyTree = None,
    strict: bool = True,
    hyperparams: str = "program",
    **more: PyTree,
) -> Loaded:
    """Loads a model, an optimizer and anything else from a file.

    Pass the initial values of a new run of the program: they give the structures, dtypes and
    shardings, and everything that is not saved, such as functions. Every name, shape, dtype and
    checksum is checked, and loading never executes code.

    ```python
    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/run.safetensors"
    >>> model = {"w": jnp.ones(2)}
    >>> saving = sl.checkpoint.save(path, model=model, opt=sl.Optimizer(sl.sgd(0.1), model))
    >>> fresh = {"w": jnp.zeros(2)}
    >>> loaded = sl.checkpoint.load(path, model=fresh, opt=sl.Optimizer(sl.sgd(0.1), fresh))
    >>> loaded["model"]
    {'w': Array([1., 1.], dtype=float32)}

    ```

    The state of an optimizer whose chain has changed is matched by the rules of `opt.rebind`: a
    transform that was wrapped, moved or chained with others keeps its state. State that the program
    stores in another codec or dtype than the file is converted.

    **Arguments:**

    - `path`: the file.
    - `model`, `opt`, `more`: trees as for `save`. Those that are left out are not loaded. Arrays
        may be abstract, `jax.ShapeDtypeStruct`s with or without a sharding.
    - `strict`: whether a difference between the file and these trees is an error. With
        `strict=False`, whatever does not fit keeps the program's value.
    - `hyperparams`: `"program"` keeps the hyperparameters of `opt`, with a warning if the file has
        others. `"file"` takes the ones from the file, to continue exactly where it was saved.

    **Returns:** a dict with the same keys and structures. Its attribute `report` lists by path
    which arrays were loaded, missing, unexpected, reshaped or of another dtype.

    **Raises:** `sl.checkpoint.MismatchError`, with all differences, unless `strict=False`;
    `sl.checkpoint.DamagedError` for a file that is truncated, changed or of another kind;
    `sl.checkpoint.NewerVersionError` for one that only a newer version can read; `OSError` if there
    is no file. If a save to this path is still running in the background, `load` waits for it, and
    raises its error if it fails.
    """
    trees = given(model, opt, more)
    settle(path)
    with _file.File(path) as file:
        arrays = {name: file.unread(name) for name in file.names if name.partition(".")[0] in trees}
        where = f"The checkpoint '{path}'"
        others = tuple(name for name in file.names if name not in arrays)
        source = Source(where, arrays | file.values(), layouts(file), others)
        return assemble(source, trees, strict, hyperparams)


def layouts(file: _file.File) -> dict[str, StateLayout]:
    """The layouts of the optimizers in a file, by path."""
    with file.parsing():
        known = json.loads(file.text["layouts"])
        found = {path: layout_from_json(x, f"{path}.") for path, x in known.items()}
        for path, layout in found.items():
            leaves = [names for side in layout.values() for names in side.leaves]
            shapes = {name: file.unread(name).shape for name in jax.tree.leaves(leaves)}
            if file.unread(f"{path}.count").shape == ():
                _check_entries(layout["state"], shapes)
        return found


def _check_entries(state: Side, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an error for vectors without an entry for each parameter."""
    for i in state.entries:
        name, count = state.leaves[i], len(leaves_of(state.places[i].node, state.places))
        shape = shapes[name]
        # More of them if two parameters have one path.
        if len(shape) > 1 or any(n < count for n in shape):
            raise ValueError(f"'{name}' does not have {count} entries")


def header(path: str | os.PathLike[str]) -> dict[str, str]:
    """The header of a checkpoint: versions, the step count, the printed optimizer and more.

    **Arguments:**

    - `path`: the file.

    **Returns:** a dict of texts. Those of `versions`, `checksums`, `dtypes`, `values`, `trees` and
    `layouts` are JSON. `checksums` has the CRC-32 of each 4 MiB of every array.

    **Raises:** as `sl.checkpoint.load`.
    """
    settle(path)
    with _file.File(path) as file:
        return file.text | {"values": file.values_text()}


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
