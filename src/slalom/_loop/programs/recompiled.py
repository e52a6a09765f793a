"""Warns of programs that are compiled again and again because a function is new each time.

A lambda that is written inside a loop is a new object in every iteration, although its code stays
the same. So two arguments count as alike if they print the same up to addresses.
"""

import re
from collections.abc import Callable
from typing import Any

from ..._core.text.messages import warn

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FUNCTION = re.compile(r"<function (\S+) at 0x[0-9a-f]+>")
_MOST = 2048

_last: dict[int, tuple[list[int], list[str], int]] = {}
"""For each kind of program, by the hash of its text: the calls of the last one compiled, the
functions in it, and the number of programs in a row that were called once."""


def watch(who: str, get_function: Callable[[], Any], arguments: Any) -> list[int]:
    """Notes that a program is to be compiled, and warns if it is the third in a row like it.

    **Arguments:**

    - `who`: what the user calls, such as `opt.step`.
    - `get_function`: returns the function that the program was made of, or `None`.
    - `arguments`: the structure and static values of the arguments.

    **Returns:** the number of calls of this program, in a list for the caller to count in.
    """
    function, calls = get_function(), [0]
    code = getattr(function, "__code__", None)
    place = type(function) if code is None else (code.co_filename, code.co_firstlineno)
    text = repr(arguments)
    functions = _FUNCTION.findall(text)
    addresses = _ADDRESS.findall(text)
    key = hash((who, place, _ADDRESS.sub("", text)))
    before, known, number = _last.get(key, (None, [], 0))
    number = number + 1 if before is not None and before[0] == 1 else 1
    if len(_last) >= _MOST:
        _last.clear()
    _last[key] = calls, addresses, number
    if number == 3:
        # Numbers differ in the text of another program, so what differs here is a function.
        if addresses == known:
            name = getattr(function, "__name__", repr(function))
            what = f"the function `{name}` is a new one each time"
            line = "step = sl.train_step(loss_fn)"
        else:
            name = f"`{functions[0]}`" if functions else "an object"
            what = f"{name} in its arguments is a new one each time"
            line = "opt = sl.Optimizer(tx, model)"
        warn(
            f"`{who}` was compiled three times for arguments that look the same, and each "
            f"program ran once: {what}. Create it once, before the loop, with what it is part of: "
            f"`{line}`."
        )
    return calls
