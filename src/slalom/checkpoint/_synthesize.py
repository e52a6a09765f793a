"""Averages that are chosen after training, from those in checkpoints."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._core.state.marks import PER_LEAF
from .._core.state.slots import Slot
from .._loop.reports.rebind import Side
from ..schedules.averages import LARGEST, synthesis_weights
from ..tree.paths import leaf_paths
from ..tree.types import PyTree
from ..wrappers.parameters.average import Average
from ._file import File
from ._leaves import decoded, placed
from ._load import layouts
from ._save import settle


class _SavedAverage(NamedTuple):
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
    settle(directory / "any")
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"There is no checkpoint in '{directory}'.")
    found: dict[str, list[_SavedAverage]] = {}
    # One at a time: a run has more snapshots than a process may have open files.
    for path in paths:
        with File(path) as file:
            _add_snapshots(file, path, opt, found)
    if not found:
        raise ValueError(
            f"The checkpoints in '{directory}' have no power-function average of '{opt}'. "
            "Train with `tx.average(sl.schedules.power_average(0.1))`, and save the optimizer."
        )
    return _with_averages(model, found, step, sigma_rel)


def _add_snapshots(file: File, path: Path, opt: str, found: dict[str, list[_SavedAverage]]) -> None:
    """Adds the averages in a file, by the path of the parameter."""
    layout = layouts(file).get(opt)
    if layout is None:
        return
    with file.parsing():
        sigmas = {
            slot.owner: float(file.unread(name).read())
            for slot, name in _pairs(layout["rules"])
            if slot.local == "decay.sigma_rel" and slot.rule == Average.__name__
        }
        if not all(0 < sigma <= float(np.float32(LARGEST)) for sigma in sigmas.values()):
            raise ValueError(f"the widths {[*sigmas.values()]}")
        state = [(slot, names) for slot, names in _pairs(layout["state"]) if slot.owner in sigmas]
        ages = {
            slot.owner: file.unread(name).read() for slot, name in state if slot.mark == PER_LEAF
        }
        ages = {owner: np.unique(age).astype(float).tolist() for owner, age in ages.items()}
        # "" is a model that is one array.
        own = [(x.param, *pair) for pair in state if (x := pair[0]).param is not None]
        times = [ages[slot.owner] for _, slot, _ in own]
        if not all(times):
            raise ValueError("an average without its number of steps")
    for (param, slot, names), (time, *others) in zip(own, times, strict=True):
        if others:
            raise ValueError(
                "The averages of some parameters were reset during the run, so their snapshots "
                "cannot be combined with those before."
            )
        if time > 0:
            snapshot = _SavedAverage(time, sigmas[slot.owner], path, names, slot.local)
            found.setdefault(param, []).append(snapshot)


def _pairs(side: Side) -> Iterator[tuple[Slot, Any]]:
    return zip(side.places, side.leaves, strict=True)


def _with_averages(
    model: PyTree, found: dict[str, list[_SavedAverage]], step: int | None, sigma_rel: float
) -> PyTree:
    leaves, structure = jax.tree.flatten(model)
    names = leaf_paths(model)
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ValueError(
            f"The checkpoints have an average of '{unknown[0]}', which the model does not have."
        )
    weights: dict[str, Any] = {}
    for name, snapshots in found.items():
        last = max(x.time for x in snapshots)
        end = last if step is None else float(step)
        if step is not None and not 1 <= step <= last:
            raise ValueError(
                f"`step` must be from 1 to {last:.0f}, the number of averaged steps in the "
                f"last checkpoint, got {step}."
            )
        pairs = [(x.time, x.sigma_rel) for x in snapshots]
        weights[name] = synthesis_weights(pairs, end, sigma_rel)
    like = dict(zip(names, leaves, strict=True))
    for name, total in _sums(found, weights, like).items():
        leaf = like[name]
        leaves[names.index(name)] = placed(total.astype(leaf.dtype), leaf)
    return structure.unflatten(leaves)


def _sums(
    found: dict[str, list[_SavedAverage]], weights: dict[str, Any], like: dict[str, Any]
) -> dict[str, Any]:
    """Σ wᵢ·averageᵢ by parameter, in float64: the weights may be large, and of both signs."""
    by_file: dict[Path, list[tuple[str, float, _SavedAverage]]] = {}
    for name, snapshots in found.items():
        for weight, snapshot in zip(weights[name], snapshots, strict=True):
            by_file.setdefault(snapshot.path, []).append((name, weight, snapshot))
    sums: dict[str, Any] = {}
    for path, terms in by_file.items():
        with File(path) as file:
            for name, weight, snapshot in terms:
                names = jax.tree.leaves(snapshot.names)
                arrays = {x: file.unread(x) for x in names}
                value, leaf = decoded(snapshot.names, arrays, snapshot.local), like[name]
                if not eqx.is_array_like(leaf) or value.shape != np.shape(leaf):
                    raise ValueError(
                        f"The checkpoints have averages of shape {value.shape}, where the model "
                        f"has {np.shape(leaf)}."
                    )
                wide = np.complex128 if np.iscomplexobj(value) else np.float64
                term = weight * value.astype(wide)
                sums[name] = term if name not in sums else sums[name] + term
    return sums
