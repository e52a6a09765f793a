"""Saves trees, and the layouts of optimizers, to one file, also in the background."""

import atexit
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core.protocol.transform import AbstractTransform
from .._core.text.calls import advise_positions
from .._core.text.messages import PACKAGE
from .._loop.binding.optimizer import Optimizer
from .._loop.binding.stepping import check_arrays, check_readable
from .._loop.programs.interrupts import HeldSignals
from ..tree.dtypes import is_key
from ..tree.types import PyTree, Tracer
from . import _file
from ._leaves import NUMBERS, kind, layout_of, layout_to_json, optimizers, raw, saved_leaves


class Saving:
    """A checkpoint on its way to the disk, as `sl.checkpoint.save` returns it."""

    path: Path
    """The file."""

    def __init__(self, path: Path, work: Callable[[], None], background: bool):
        """Starts to save.

        **Arguments:**

        - `path`: the file.
        - `work`: writes it.
        - `background`: whether to return before it is written.
        """
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        # Not `Thread.join`: before Python 3.13, Ctrl-C in it marks a thread that runs as ended.
        self._ended = threading.Event()
        self._process = os.getpid()
        thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        if background:
            # Ctrl-C waits, or the next save would not know of this one, and could end before it.
            with HeldSignals(()):
                # The system may have no more threads, or the program may be about to end.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                if thread.ident is not None:
                    self._thread = thread
                    _unfinished[_place(path)] = self
        if self._thread is None:
            work()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            error.add_note(f"This happened while '{self.path}' was saved in the background.")
            self._error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether the file is written, or writing it has failed.

        **Raises:** `RuntimeError` in a process that was forked since, which cannot know.
        """
        self._check_process()
        return self._thread is None or self._ended.is_set()

    def wait(self) -> Path:
        """Waits until the file is written.

        **Returns:** its path.

        **Raises:** the error, if it could not be written; `RuntimeError` in a process that was
        forked since, which cannot know.
        """
        self._check_process()
        if self._thread is not None:
            self._ended.wait()
        if _unfinished.get(_place(self.path)) is self:
            _unfinished.pop(_place(self.path), None)  # another thread may wait for it, too
        if self._error is not None:
            raise self._error
        return self.path

    def _check_process(self) -> None:
        if self._thread is not None and os.getpid() != self._process:
            raise RuntimeError(
                f"'{self.path}' is being saved by the process {self._process}, of which this one "
                "is a fork. Wait in that process, or before the fork."
            )

    def __repr__(self) -> str:
        if self._thread is not None and os.getpid() != self._process:
            state = f"in process {self._process}"
        else:
            state = "failed" if self._error else "done" if self.done else "under way"
        return f"<saving '{self.path}': {state}>"


_unfinished: dict[Path, Saving] = {}
"""The last save to each directory in the background, until its result is known to the caller."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unfinished.clear)


def _place(path: str | os.PathLike[str]) -> Path:
    """The directory of a file, whatever links lead to it."""
    return Path(os.path.realpath(path)).parent


def wait_for_saves(path: str | os.PathLike[str]) -> None:
    """Waits for a save to the directory of this file, and raises its error if nobody has seen it.

    Called before the next snapshot is made: at most one for each directory is in memory, and saves
    end in their order. And before a file is read, which would be the old one otherwise.
    """
    if (saving := _unfinished.get(_place(path))) is not None:
        saving.wait()


@atexit.register
def _report_errors() -> None:
    for saving in list(_unfinished.values()):
        try:
            saving.wait()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)


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
    return start(Path(path), trees_of(model, opt, more), background, lambda: None)


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
    trees = trees_of(model, opt, more)
    return {name: leaf for root, x in trees.items() for name, leaf in saved_leaves(root, x).items()}


def trees_of(model: PyTree, opt: PyTree, more: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The trees that were passed, by keyword."""
    trees = {"model": model, "opt": opt, **more}
    trees = {name: x for name, x in trees.items() if x is not None}
    if isinstance(opt, AbstractTransform):
        raise TypeError(
            "`opt` must be an optimizer, got a transform, which has no state. Pass what "
            "`sl.Optimizer(tx, model)` returned, or the state under a name of your own: "
            "`state=state`."
        )
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
    wait_for_saves(path)
    opts = {name: opt for root, x in trees.items() for name, opt in optimizers(root, x).items()}
    for opt in opts.values():
        check_readable(opt)
        check_arrays(opt, or_shapes=True)
    items = to_dict(**trees)
    for name in items:
        _file.check_name(name)
    values = {name: x for name, x in items.items() if type(x) in NUMBERS}
    leaves = {name: x for name, x in items.items() if name not in values}
    _check_savable(leaves)
    arrays, dtypes = _to_host(leaves, copy=background)
    header = _header(trees, opts)

    def work() -> None:
        _file.write(path, arrays, dtypes=dtypes, values=values, header=header)
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


# --- to the host ----------------------------------------------------------------------------


def _check_savable(leaves: Mapping[str, Any]) -> None:
    """Raises an error for arrays whose values this process cannot read."""
    for name, x in leaves.items():
        if isinstance(x, Tracer):
            raise TypeError(
                f"'{name}' is being traced: a checkpoint cannot be saved inside a function that "
                "JAX transforms. Save what the compiled function returns."
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"'{name}' is abstract: it has a shape, but no values to save.")
        if not isinstance(x, jax.Array):
            continue
        if x.is_deleted():
            raise ValueError(
                f"'{name}' was donated to a training step, so it can no longer be saved. Save the "
                "model and the optimizer that the step returned."
            )
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"'{name}' is spread over several processes, and this process has only a part of "
                "it. Save `sl.checkpoint.to_dict(model=model, opt=opt)` with Orbax."
            )


def _to_host(leaves: Mapping[str, Any], copy: bool) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """NumPy arrays, and the dtypes of arrays that stand for another one.

    **Arguments:**

    - `leaves`: arrays by name.
    - `copy`: whether the result must stay valid when the arrays are donated or changed.
    """
    kinds = {name: kind(x) for name, x in leaves.items() if is_key(x)}
    arrays = {name: raw(x) for name, x in leaves.items()}
    for x in arrays.values():
        if isinstance(x, jax.Array):
            x.copy_to_host_async()
    # On the CPU, `np.asarray` shows the memory of the array itself.
    return {name: np.array(x, copy=copy or None) for name, x in arrays.items()}, kinds
