"""What to say of a name that is not here: the one that was probably meant."""

import difflib
import sys
from collections.abc import Callable
from typing import NoReturn

from ._core.fluent import FLUENT

PACKAGE = __name__.partition(".")[0]

ELSEWHERE = {
    "MultiSteps": "tx.every_k(k)",
    "apply_if_finite": "tx.if_finite(n)",
    "conditionally_transform": "tx.when(condition)",
    "inject_hyperparams": "sl.adam(lr), read opt.hyperparams and change opt.with_hyperparams(...)",
    "masked": "tx.mask(where), or tx.only(where)",
    "multi_transform": "sl.partition(transforms, labels)",
    "reduce_on_plateau": 'tx.drive({"learning_rate": sl.schedules.ReduceOnPlateau(...)})',
}
"""What is written here for well-known names of what has another form."""


def absent(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module: it refuses, and suggests."""

    def refuse(name: str) -> NoReturn:
        advice = "" if name.startswith("_") else _advice(name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'.{advice}", name=name)

    return refuse


def no_attribute(optimizer: type, name: str) -> AttributeError:
    """What to raise for a name that optimizers do not have."""
    internal = ("binding",)
    public = ", ".join(k for k in vars(optimizer) if k[0] != "_" and k not in internal)
    return AttributeError(
        f"'{optimizer.__name__}' object has no attribute '{name}'. It has {public}. Numbers are "
        'read with `opt.hyperparams["learning_rate"]` and changed with `opt = '
        "opt.with_hyperparams(learning_rate=1e-4)`; the model is not in it.",
        name=name,
    )


def _advice(name: str) -> str:
    if name in ELSEWHERE:
        return f" Write {ELSEWHERE[name]}."
    known = _known()
    meant = [_plain(name)] if _plain(name) in known else []
    meant = meant or difflib.get_close_matches(_plain(name), known, n=3)
    return f" Did you mean {' or '.join(known[n] for n in meant)}?" if meant else ""


def _known() -> dict[str, str]:
    """How each public name is written."""
    top = [name for name in vars(sys.modules[PACKAGE]) if name[0] != "_"]
    known = {_plain(name): f"sl.{name}" for name in top}
    for part in ("tree", "where", "schedules"):
        public = sys.modules[f"{PACKAGE}.{part}"].__all__
        known |= {_plain(name): f"sl.{part}.{name}" for name in public}
    return known | {_plain(name): f"tx.{name}(...)" for name in FLUENT if name[0] != "_"}


def _plain(name: str) -> str:
    """A name without its style: `clip_by_global_norm` as `ClipByGlobalNorm`."""
    return name.lower().replace("_", "").removesuffix("schedule")
