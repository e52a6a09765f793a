"""Warns of loops that use an optimizer in part only, that ascend, or that compile again and again.

The first keep one of the two results of `opt.step`, step with an optimizer that never changes, or
ignore its scale of the loss.
"""

import re
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ... import tree
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.loss import loss_of
from ..._core.protocol.parts import AbstractTraits, transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.messages import warn
from ...tree.paths import dotted
from ...tree.types import Params, PyTree, Tracer, is_deleted, under_jit

_MOST_CALLS = 3


def _nothing() -> None:
    return None


class _LastCall(threading.local):
    """The last call of `opt.step` in a thread."""

    references: tuple[Callable[[], Any], ...] = (_nothing,) * 4
    """References to the model and the count that went in, and to those that came out."""
    number: int = 1
    """The number of calls in a row that went on with one of the results and not with the other."""


_last_call = _LastCall()


def watch_results(model: PyTree, opt: Any, new_model: PyTree, new_opt: Any) -> None:
    """Notes a call of `opt.step`, and warns if it is the third that went on with one result only.

    **Arguments:**

    - `model`, `opt`: what went in.
    - `new_model`, `new_opt`: what came out.
    """
    count, new_count = opt.arrays.count, new_opt.arrays.count  # they stand for the optimizers
    if isinstance(count, Tracer) or isinstance(new_count, Tracer):
        return
    last_model, last_count, before, returned_count = (get() for get in _last_call.references)
    same_opt = last_count is count and before is model
    same_model = last_model is model and returned_count is count
    _last_call.number = _last_call.number + 1 if same_opt or same_model else 1
    _last_call.references = tuple(map(_reference, (model, count, new_model, new_count)))
    if _last_call.number == _MOST_CALLS:
        if _has_no_state(opt) if same_opt else _is_equal(before, model):
            return
        lost = "optimizer, so its state" if same_opt else "model, so it"
        warn(
            f"`opt.step` was called {_MOST_CALLS} times with the same {lost} never changes. Assign "
            "both results: `model, opt = opt.step(model, grads)`."
        )


def _reference(x: Any) -> Callable[[], Any]:
    """Returns the object, which it does not keep alive."""
    try:
        return weakref.ref(x)
    except TypeError:  # a dict, whose id another one may get
        return _nothing


def _has_no_state(opt: Any) -> bool:
    """Whether all steps of the optimizer are alike."""

    def is_schedule(x: object) -> bool:
        return isinstance(x, AbstractSchedule)

    numbers = jax.tree.leaves(opt.transform, is_leaf=is_schedule)
    has_clock = any("step" in part.module.needs for part in transforms(opt.transform))
    return not (jax.tree.leaves(opt.state) or any(map(is_schedule, numbers)) or has_clock)


def _is_equal(before: PyTree, model: PyTree) -> bool:
    """Whether the last step changed nothing, as inside a window of `.every_k`."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(model), strict=False)
    return before is not None and all(
        x is y or (not (is_deleted(x) or is_deleted(y)) and bool(jnp.all(x == y)))
        for x, y in pairs
        if tree.is_array(x)
    )


def note_scale_is_read(binding: Any) -> None:
    """Notes that the caller knows the scale of the loss."""
    object.__setattr__(binding, "scale_is_read", True)


def warn_of_unread_scale(opt: Any) -> None:
    """Warns of a step by hand whose gradients cannot be those of the scaled loss."""
    if not opt.binding.scale_is_read and "scaled loss" in loss_of(opt.transform).askers:
        warn(
            "`.scale_loss()` divides the gradients by a scale that nobody has read from this "
            "optimizer, so they cannot be those of the scaled loss. Differentiate "
            "`opt.loss_scale * loss`, or step with `sl.train_step`, which scales the loss itself."
        )


def warn_of_capture(opt: Any, inputs: PyTree) -> None:
    """Warns of an optimizer that is no argument of the function that is traced around a step."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(opt)) or _has_no_state(opt):
        return
    if any(isinstance(x, Tracer) and under_jit(x) for x in jax.tree.leaves(inputs)):
        warn(
            "The function that JAX traces here captured this optimizer, so each of its calls "
            "starts from the same state. Pass the optimizer as an argument, and return the new "
            "one: `def step(model, opt, x): ...; return model, opt`."
        )


def warn_of_ascent(transform: AbstractTransform[Any], params: Params) -> None:
    """Warns of a rule without a learning rate, whose steps follow the gradients upwards."""
    inner = (part.module for part in transforms(transform) if not part.children())
    deliberate = any(
        link.update_sign != 1 or type(link).signs is not AbstractTraits.signs for link in inner
    )
    if not deliberate and set(transform.signs(params)) == {1}:
        names = [part.name for part in transforms(transform) if part.name]
        warn(
            f"A step of this optimizer ascends the loss: nothing in '{names[-1]}' flips the sign "
            "of the gradients. Add a learning rate, `tx | sl.ScaleByLearningRate(1e-3)`. To ascend "
            "on purpose, use `.maximize()` on the result."
        )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FUNCTION = re.compile(r"<function (\S+) at 0x[0-9a-f]+>")
_MOST_TEXTS = 2048

_last_compiled: dict[int, tuple[list[int], list[str], dict[int, Any], int]] = {}
"""For each kind of program, by the hash of its text: the calls of the last one compiled, the
functions and the numbers in it, and the number of programs in a row that were called once."""


def watch(
    who: str, body: Any, function: Any, structure: Any, statics: Mapping[int, Any], shapes: Any
) -> list[int]:
    """Notes that a program is to be compiled, and warns if it is the third in a row like it.

    A lambda that is written inside a loop is a new object in every iteration, although its code
    stays the same. So two arguments count as alike if they print the same up to addresses and
    numbers.

    **Arguments:**

    - `who`: what the user calls, such as `opt.step`.
    - `body`: what is compiled.
    - `function`: the loss among the arguments, or `None`.
    - `structure`, `statics`: the structure of the arguments, and their static leaves by position.
    - `shapes`: the shapes of what is carried, and where it is.

    **Returns:** the number of calls of this program, in a list for the caller to count in.
    """
    calls = [0]
    code = getattr(function, "__code__", None)
    source = type(function) if code is None else (code.co_filename, code.co_firstlineno)
    numbers = {i: x for i, x in statics.items() if type(x) in (int, float)}
    others = {i: type(x) if i in numbers else x for i, x in statics.items() if x is not function}
    text = repr((structure, others, shapes))
    functions = _FUNCTION.findall(text)
    addresses = _ADDRESS.findall(text)
    key = hash((body, source, _ADDRESS.sub("", text)))
    before, last_addresses, last_numbers, number = _last_compiled.get(key, (None, [], {}, 0))
    number = number + 1 if before is not None and before[0] == 1 else 1
    if len(_last_compiled) >= _MOST_TEXTS:
        _last_compiled.clear()
    _last_compiled[key] = calls, addresses, numbers, number
    if number == 3 and numbers != last_numbers:
        _warn_of_numbers(who, structure, numbers, last_numbers)
    elif number == 3:
        if addresses == last_addresses and function is not None:
            name = getattr(function, "__name__", type(function).__name__)
            what, line = f"the function `{name}`", "step = sl.train_step(loss_fn)"
        else:
            what = f"`{functions[0]}`" if functions else "an object"
            what, line = f"{what} in its arguments", "opt = sl.Optimizer(tx, model)"
        warn(
            f"`{who}` was compiled three times for arguments that look the same, and each program "
            f"ran once: {what} is a new one each time. Create it once, before the loop, with what "
            f"it is part of: `{line}`."
        )
    return calls


def _warn_of_numbers(
    who: str, structure: Any, numbers: Mapping[int, Any], before: Mapping[int, Any]
) -> None:
    named = jax.tree_util.tree_leaves_with_path(structure.unflatten(range(structure.num_leaves)))
    differ = [dotted(path) for path, i in named if i in numbers and numbers[i] != before.get(i)]
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    warn(
        f"`{who}` was compiled three times for Python numbers with other values, and each program "
        f"ran once: '{differ[0]}'{more} is a number, which is static. Pass an array in place of "
        "the number, or of the list of numbers: `jnp.asarray(x)`."
    )
