"""Loads trees from one file or from a dict, and averages from the checkpoints of a run."""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._core.state.marks import PER_LEAF
from .._core.state.slots import leaves_of
from .._core.text.calls import advise_positions
from ..schedules.averages import LARGEST, synthesis_weights
from ..tree.paths import leaf_paths
from ..tree.types import PyTree
from ..wrappers.parameters.average import Average
from ._file import File
from ._leaves import StateLayout, decoded, layout_from_json, placed
from ._match import Loaded, Source, assemble
from ._save import trees_of, wait_for_saves


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
        `strict=False`, whatever does not fit keeps the program's value. Copies of parameters, such
        as the slow weights of `.lookahead`, would then be those of another model than the loaded
        one, with a warning.
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
    trees = trees_of(model, opt, more)
    wait_for_saves(path)
    with File(path) as file:
        source = Source(f"The checkpoint '{path}'", file.arrays | file.values(), layouts(file))
        return assemble(source, trees, strict, hyperparams)


def layouts(file: File) -> dict[str, StateLayout]:
    """The layouts of the optimizers in a file, by path.

    Raises an error for an array that the file does not have, and for vectors without an entry for
    each parameter.
    """
    with file.parsing():
        texts = json.loads(file.text["layouts"])
        by_path = {path: layout_from_json(x, f"{path}.") for path, x in texts.items()}
        for path, layout in by_path.items():
            leaves = [names for side in layout.values() for names in side.leaves]
            shapes = {name: file.arrays[name].shape for name in jax.tree.leaves(leaves)}
            state, runs = layout["state"], file.arrays[f"{path}.count"].shape
            for i in state.entries:
                name, count = state.leaves[i], len(leaves_of(state.places[i].node, state.places))
                of_leaves = shapes[name][len(runs) :]
                # More of them if two parameters have one path.
                is_whole = len(of_leaves) < 2 and all(n >= count for n in of_leaves)
                if not is_whole or shapes[name] != runs + of_leaves:
                    raise ValueError(f"'{name}' does not have {count} entries")
        return by_path


def header(path: str | os.PathLike[str]) -> dict[str, str]:
    """The header of a checkpoint: versions, the step count, the printed optimizer and more.

    **Arguments:**

    - `path`: the file.

    **Returns:** a dict of texts. Those of `versions`, `checksums`, `dtypes`, `values`, `trees` and
    `layouts` are JSON. `checksums` has the CRC-32 of each 4 MiB of every array.

    **Raises:** as `sl.checkpoint.load`.
    """
    wait_for_saves(path)
    with File(path) as file:
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
    trees = trees_of(model, opt, more)
    return assemble(Source("The dict", items, {}), trees, strict, hyperparams)


class _SavedAverage(NamedTuple):
    param: str
    """The path of the parameter."""
    time: float
    """The number of steps that were averaged."""
    sigma_rel: float
    path: Path
    """The file."""
    names: Any
    """The average, as a leaf of a layout."""
    local: str
    """The path of the average in its state."""


def synthesize(
    directory: str | os.PathLike[str],
    model: PyTree,
    *,
    sigma_rel: float,
    step: int | None = None,
    opt: str = "opt",
) -> PyTree:
    """A power-function average of any width, from the averages in the checkpoints of a run.

    Train with two averages of different widths, and save the optimizer now and then. Other widths
    are mixed from all averages in all files, with weights wᵢ such that the weight of each step of
    the run is closest, in the mean square, to the profile of the requested average. The weights sum
    to 1.

    ```python
    >>> import tempfile
    >>> average = sl.schedules.power_average
    >>> model = {"w": jnp.ones(2)}
    >>> opt = sl.Optimizer(sl.sgd(0.1).average(average(0.1)).average(average(0.05)), model)
    >>> snapshots = sl.checkpoint.Rolling(tempfile.mkdtemp(), keep=None)
    >>> for _ in range(4):
    ...     model, opt = opt.step(model, {"w": jnp.ones(2)})
    ...     saving = snapshots.save(opt=opt)
    >>> averaged = sl.checkpoint.synthesize(snapshots.directory, model, sigma_rel=0.07)

    ```

    A snapshot every 1 % to 2 % of the run is enough for any width down to the smallest that was
    tracked. The files are opened one after the other, and the sums are in memory in float64.

    **Arguments:**

    - `directory`: the directory with the checkpoints, as in `sl.checkpoint.Rolling`.
    - `model`: the model, which gives structure, dtypes and shardings, and all leaves that are not
        averaged.
    - `sigma_rel`: the width σ_rel of the average, in (0, 0.288].
    - `step`: the number of averaged steps at which it ends, from 1 to that of the last checkpoint,
        which is the default.
    - `opt`: the name of the optimizer in the files.

    **Returns:** the model with the average.

    **Raises:** `FileNotFoundError` if there is no checkpoint; `ValueError` if the files have no
    average with `sl.schedules.power_average`, or not of this model.

    ??? cite "Karras et al., [Analyzing and Improving the Training Dynamics of Diffusion
        Models](https://arxiv.org/abs/2312.02696), 2024"
    """
    if not 0 < sigma_rel <= LARGEST:
        raise ValueError(f"`sigma_rel` must be in (0, {LARGEST}], got {sigma_rel}.")
    directory = Path(os.path.abspath(directory))
    wait_for_saves(directory / "any")
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"There is no checkpoint in '{directory}'.")
    # One file at a time: a run has more snapshots than a process may have open files.
    averages = [average for path in paths for average in _averages_in(path, opt)]
    if not averages:
        raise ValueError(
            f"The checkpoints in '{directory}' have no power-function average of '{opt}'. "
            "Train with `tx.average(sl.schedules.power_average(0.1))`, and save the optimizer."
        )
    leaves, structure = jax.tree.flatten(model)
    names = leaf_paths(model)
    like = dict(zip(names, leaves, strict=True))
    for name, total in _sums(_terms(averages, names, step, sigma_rel), like).items():
        like[name] = placed(total.astype(like[name].dtype), like[name])
    return structure.unflatten([like[name] for name in names])


def _averages_in(path: Path, opt: str) -> list[_SavedAverage]:
    """The averages of an optimizer in a file."""
    with File(path) as file:
        layout = layouts(file).get(opt)
        if layout is None:
            return []
        with file.parsing():
            sigmas = {
                slot.owner: float(file.arrays[name].read())
                for slot, name in layout["rules"].pairs
                if slot.local == "decay.sigma_rel" and slot.rule == Average.__name__
            }
            if not all(0 < sigma <= float(np.float32(LARGEST)) for sigma in sigmas.values()):
                raise ValueError(f"the widths {[*sigmas.values()]}")
            state = [pair for pair in layout["state"].pairs if pair[0].owner in sigmas]
            ages = {x.owner: file.arrays[name].read() for x, name in state if x.mark == PER_LEAF}
            times = {owner: float(age.max()) for owner, age in ages.items()}
            # "" is a model that is one array.
            averages = [
                _SavedAverage(x.param, times[x.owner], sigmas[x.owner], path, names, x.local)
                for x, names in state
                if x.param is not None
            ]
    if any(age.min() != age.max() for age in ages.values()):
        raise ValueError(
            "The averages of some parameters were reset during the run, so their snapshots cannot "
            "be combined with those before."
        )
    return [average for average in averages if average.time > 0]


def _terms(
    averages: list[_SavedAverage], names: list[str], step: int | None, sigma_rel: float
) -> list[tuple[_SavedAverage, float]]:
    """The averages, file by file, with their weights in the sums of their parameters."""
    of_param: dict[str, list[_SavedAverage]] = {}
    for average in averages:
        of_param.setdefault(average.param, []).append(average)
    terms: list[tuple[_SavedAverage, float]] = []
    for name, group in of_param.items():
        if name not in names:
            raise ValueError(
                f"The checkpoints have an average of '{name}', which the model does not have."
            )
        snapshots = [(average.time, average.sigma_rel) for average in group]
        last, _ = max(snapshots)
        if step is not None and not 1 <= step <= last:
            raise ValueError(
                f"`step` must be from 1 to {last:.0f}, the number of averaged steps in the "
                f"last checkpoint, got {step}."
            )
        end = last if step is None else float(step)
        terms += zip(group, synthesis_weights(snapshots, end, sigma_rel), strict=True)
    return sorted(terms, key=lambda term: term[0].path)


def _sums(terms: list[tuple[_SavedAverage, float]], like: dict[str, Any]) -> dict[str, Any]:
    """Σ wᵢ·averageᵢ by parameter, in float64: the weights may be large, and of both signs."""
    sums: dict[str, Any] = {}
    for path, of_file in itertools.groupby(terms, lambda term: term[0].path):
        with File(path) as file:
            for average, weight in of_file:
                value = decoded(average.names, file.arrays, average.local)
                leaf = like[average.param]
                if not eqx.is_array_like(leaf) or value.shape != np.shape(leaf):
                    raise ValueError(
                        f"The checkpoints have averages of shape {value.shape}, where the model "
                        f"has {np.shape(leaf)}."
                    )
                wide = np.complex128 if np.iscomplexobj(value) else np.float64
                sums[average.param] = sums.get(average.param, 0) + weight * value.astype(wide)
    return sums
