"""Warns of programs that are compiled again and again for new functions or other numbers.

A lambda that is written inside a loop is a new object in every iteration, although its code stays
the same. So two arguments count as alike if they print the same up to addresses and numbers.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..._core.text.messages import warn
from ...tree.paths import dotted

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FUNCTION = re.compile(r"<function (\S+) at 0x[0-9a-f]+>")
_MOST = 2048

_last: dict[int, tuple[list[int], list[str], dict[int, Any], int]] = {}
"""For each kind of program, by the hash of its text: the calls of the last one compiled, the
functions and the numbers in it, and the number of programs in a row that were called once."""


def watch(
    who: str,
    get_function: Callable[[], Any],
    structure: Any,
    statics: Mapping[int, Any],
    shapes: Any,
) -> list[int]:
    """Notes that a program is to be compiled, and warns if it is the third in a row like it.

    **Arguments:**

    - `who`: what the user calls, such as `opt.step`.
    - `get_function`: returns the function that the program was made of, or `None`.
    - `structure`, `statics`: the structure of the arguments, and their static leaves by position.
    - `shapes`: the shapes of what is carried, and where it is.

    **Returns:** the number of calls of this program, in a list for the caller to count in.
    """
    function, calls = get_function(), [0]
    code = getattr(function, "__code__", None)
    place = type(function) if code is None else (code.co_filename, code.co_firstlineno)
    numbers = {i: x for i, x in statics.items() if type(x) in (int, float)}
    others = {i: type(x) if i in numbers else x for i, x in statics.items()}
    text = repr((structure, others, shapes))
    functions = _FUNCTION.findall(text)
    addresses = _ADDRESS.findall(text)
    key = hash((who, place, _ADDRESS.sub("", text)))
    before, known, last_numbers, number = _last.get(key, (None, [], {}, 0))
    number = number + 1 if before is not None and before[0] == 1 else 1
    if len(_last) >= _MOST:
        _last.clear()
    _last[key] = calls, addresses, numbers, number
    if number == 3:
        if numbers != last_numbers:
            _warn_of_numbers(who, structure, numbers, last_numbers)
        elif addresses == known:
            name = getattr(function, "__name__", repr(function))
            _warn_of_functions(who, f"the function `{name}`", "step = sl.train_step(loss_fn)")
        else:
            name = (
                f"`{functions[0]}` in its arguments" if functions else "an object in its arguments"
            )
            _warn_of_functions(who, name, "opt = sl.Optimizer(tx, model)")
    return calls


def _warn_of_functions(who: str, what: str, line: str) -> None:
    warn(
        f"`{who}` was compiled three times for arguments that look the same, and each program ran "
        f"once: {what} is a new one each time. Create it once, before the loop, with what it is "
        f"part of: `{line}`."
    )


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
