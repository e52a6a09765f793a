"""Many training steps in one compiled program."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from ..._core.protocol.parts import transforms
from ..._core.text.messages import check_bool, check_int
from ...tree import is_array
from ...tree.packed import pack, unpack
from ...tree.paths import dotted
from ...tree.types import PyTree
from ..programs.arguments import carried
from ..reports.describe import metrics
from .batch import TrainingInputs, check_state, is_single_key
from .gradient import train_step
from .options import check_model_state


def scan_steps(inputs: TrainingInputs) -> tuple[list[Array], PyTree]:
    """The body of a program that takes many training steps, by `scan` and `model_state`.

    **Returns:** the new values of the carried leaves, and the results after the model and the
    optimizer, with the states that `check_guarded` takes.
    """
    scan, start = inputs.scan or {}, inputs.model_state
    options = inputs.options._replace(has_model_state=start is not None)
    inputs = inputs._replace(options=options, scan=None, model_state=None)
    # The model's functions cannot be carried, so the leaves are.
    leaves, structure = jax.tree.flatten(inputs)
    positions = [*carried(inputs, structure.unflatten(range(len(leaves))))]
    arguments = {"args": inputs.args, "context": inputs.context, "kwargs": inputs.kwargs}
    rows, same, length = _per_step(arguments, scan["length"])

    def with_carried(new: list[Array]) -> TrainingInputs:
        filled = dict(enumerate(leaves)) | dict(zip(positions, new, strict=True))
        return structure.unflatten(filled.values())

    def body(carry: tuple[list[Array], PyTree], row: PyTree) -> Any:
        before, model_state = carry
        now = with_carried(before)._replace(**eqx.combine(row, same))
        if start is not None:
            now = now._replace(args=(model_state, *now.args))
        new, ((returned,), _) = train_step(now)
        if start is not None:
            *returned, model_state = returned
            check_state(model_state, start, "`model_state`")
        opt = with_carried(new).opt
        measured = (metrics(opt.transform, opt.state),) if scan["with_metrics"] else ()
        return (new, model_state), pack((returned, measured, _guarded(opt)))

    first = [leaves[i] for i in positions]
    (new, model_state), packed = jax.lax.scan(
        body, (first, start), rows, length=length, unroll=scan["unroll"]
    )
    returned, measured, guarded = unpack(packed)
    returned = returned if start is None else (*returned, model_state)
    return new, ((returned, *measured), guarded)


def _per_step(arguments: PyTree, length: int | None) -> tuple[PyTree, PyTree, int]:
    """The arguments of the loss and of the transforms that differ from step to step, stacked; those
    that are the same; and the number of steps.

    **Arguments:**

    - `arguments`: the positional arguments, the keywords and the context.
    - `length`: the number of steps, if it was passed.
    """

    def differs(path: Any, x: Any) -> bool:
        return is_array(x) and (path[0].key == "args" or is_single_key(x))

    rows, same = eqx.partition(arguments, jax.tree_util.tree_map_with_path(differs, arguments))
    sizes = {} if length is None else {"keyword `length`": length}
    for (_, *path), x in jax.tree_util.tree_leaves_with_path({"args": rows["args"]}):
        if is_single_key(x):
            continue
        name = f"positional argument {dotted(tuple(path))}"
        if x.ndim == 0:
            raise ValueError(
                f"The {name} of `step.scan` is a scalar, so it has no axis of steps. Pass by "
                "keyword what is the same in every step."
            )
        sizes[name] = x.shape[0]
    if not sizes:
        raise TypeError(
            "`step.scan` does not know the number of steps. Pass arrays with an axis of steps by "
            "position, or `length=`."
        )
    (first, number), *others = sizes.items()
    for name, size in others:
        if size != number:
            raise ValueError(
                f"The arguments of `step.scan` have different numbers of steps: the {first} has "
                f"{number}, and the {name} has {size}. Pass by keyword what is the same in every "
                "step, such as one batch: `step.scan(model, opt, length=10, x=x, y=y)`."
            )

    def stacked(x: Array) -> Array:
        # One key for all steps would give all of them the same noise.
        return jax.random.split(x, number) if is_single_key(x) else x

    return jax.tree.map(stacked, rows), same, number


def _guarded(opt: Any) -> list[Any]:
    """The states of the transforms that may forbid the next step."""
    parts = transforms(opt.transform, opt.state)
    states = [part.state for part in parts if part.module.guard is not None]
    return [dataclasses.replace(s, inner=None) if hasattr(s, "inner") else s for s in states]


def check_guarded(opt: Any, guarded: list[Any], results: Any) -> None:
    """Raises the error that a step of a scan has recorded. It carries the results of the scan.

    **Arguments:**

    - `opt`: the optimizer after the scan.
    - `guarded`: the states of the transforms that may raise, stacked along the steps.
    - `results`: what the scan returns.
    """
    parts = [part for part in transforms(opt.transform) if part.module.guard is not None]
    for part, states in zip(parts, guarded, strict=True):
        try:
            part.module.guard(part.name, states)
        except Exception as error:
            error.results = results  # pyright: ignore[reportAttributeAccessIssue]  # any exception may carry more
            error.add_note(
                "`step.scan` has taken all its steps. What it returns is in `error.results`."
            )
            raise


def check_scan(inputs: TrainingInputs) -> None:
    """Raises an error for options that a scan cannot have, and for a list of batches."""
    scan, options = inputs.scan or {}, inputs.options
    for i, batch in enumerate(inputs.args):
        if _is_list_of_batches(batch):
            raise TypeError(
                f"The positional argument {i} of `step.scan` is a list of {len(batch)} alike, and "
                "its arrays would be divided along their first axis. To take a step with each "
                "entry, stack them: `step.scan(model, opt, *jax.tree.map(lambda *x: jnp.stack(x), "
                "*batches))`. If the loss takes a list, pass a tuple."
            )
    if scan["length"] is not None:
        check_int("`length` of `step.scan`", scan["length"], 0)
    check_int("`unroll` of `step.scan`", scan["unroll"], 1)
    check_bool("`with_metrics` of `step.scan`", scan["with_metrics"])
    if inputs.model_state is None:
        return
    if not options.has_aux:
        raise ValueError(
            "`model_state` is what the loss returns as its `aux`. Write "
            "`sl.train_step(loss_fn, has_aux=True)`, and return (loss, model_state)."
        )
    check_model_state(options.microbatches, inputs.model_state)


def _is_list_of_batches(x: Any) -> bool:
    if not isinstance(x, list) or not x:
        return False
    shapes = [jax.tree.map(np.shape, entry) for entry in x]
    return shapes.count(shapes[0]) == len(x) and jax.tree.leaves(x[0]) != []
