"""Loads trees from one file."""

import json
import os
from typing import Any

from .._types import PyTree
from . import _file
from ._assemble import Loaded, Source, assemble
from ._leaves import from_host
from ._optimizers import Layout
from ._save import given


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

    Pass what a new run of the program starts with: it gives the structures, dtypes and shardings,
    and everything that is not saved, such as functions. Every name, shape, dtype and checksum is
    checked, and nothing in the file is ever executed.

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
    transform that was wrapped, moved or chained with others keeps its state.

    **Arguments:**

    - `path`: the file.
    - `model`, `opt`, `more`: trees as for `save`. Those that are left out are not loaded. Arrays
        may be abstract, `jax.ShapeDtypeStruct`s with or without a sharding.
    - `strict`: whether a difference between the file and these trees is an error. With
        `strict=False`, whatever does not fit keeps the program's value.
    - `hyperparams`: `"program"` keeps the hyperparameters of `opt`, with a warning if those of the
        file differ. `"file"` takes those of the file, to continue exactly where it was saved.

    **Returns:** a dict with the same keys and structures. Its attribute `report` lists by path what
    was loaded, and what is missing, unexpected, reshaped or of another dtype.

    **Raises:** `sl.checkpoint.MismatchError`, with all differences, unless `strict=False`;
    `sl.checkpoint.DamagedError` for a file that is truncated, changed or of another kind; `OSError`
    if there is no file.
    """
    trees = given(model, opt, more)
    contents = _file.read(path, lambda name: name.partition(".")[0] in trees)
    items: dict[str, Any] = {
        name: from_host(x, contents.dtypes.get(name)) for name, x in contents.arrays.items()
    }
    known = json.loads(contents.header["layouts"])
    layouts = {place: Layout.from_json(layout) for place, layout in known.items()}
    source = Source(f"The checkpoint '{path}'", items | contents.values, layouts)
    return assemble(source, trees, strict, hyperparams)


def header(path: str | os.PathLike[str]) -> dict[str, str]:
    """The header of a checkpoint: versions, the step count, the printed optimizer and more.

    **Arguments:**

    - `path`: the file.

    **Returns:** a dict of texts. Those of `versions`, `checksums`, `dtypes`, `values`, `trees` and
    `layouts` are JSON.

    **Raises:** as `sl.checkpoint.load`.
    """
    return _file.read(path, lambda name: False).header
