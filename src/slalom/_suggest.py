"""Suggestions for names that do not exist."""

import dataclasses
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
"""What to write instead of well-known names from Optax."""


def absent(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for a module: it raises an error that suggests a name."""

    def raise_error(name: str) -> NoReturn:
        advice = "" if name.startswith("_") else _advice(name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'.{advice}", name=name)

    return raise_error


def frozen_attribute(name: str) -> AttributeError:
    """The error for setting an attribute of an optimizer."""
    return dataclasses.FrozenInstanceError(
        f"An optimizer is immutable, so '{name}' cannot be set. To change a hyperparameter, write "
        f"`opt = opt.with_hyperparams({name}=...)`."
    )


def no_attribute(optimizer: type, name: str) -> AttributeError:
    """The error for an attribute that optimizers do not have."""
    internal = ("binding",)
    public = ", ".join(k for k in vars(optimizer) if k[0] != "_" and k not in internal)
    return AttributeError(
        f"'{optimizer.__name__}' object has no attribute '{name}'. Its attributes are {public}. "
        'Read hyperparameters with `opt.hyperparams["learning_rate"]` and change them with '
        "`opt = opt.with_hyperparams(learning_rate=1e-4)`. The optimizer does not hold the model.",
        name=name,
    )


def _advice(name: str) -> str:
    if name in ELSEWHERE:
        return f" Write {ELSEWHERE[name]}."
    known = _known()
    close = [_plain(name)] if _plain(name) in known else []
    close = close or difflib.get_close_matches(_plain(name), known, n=3)
    return f" Did you mean {' or '.join(known[n] for n in close)}?" if close else ""


def _known() -> dict[str, str]:
    """The code for each public name, by the name in lower case without underscores."""
    top = [name for name in vars(sys.modules[PACKAGE]) if name[0] != "_"]
    known = {_plain(name): f"sl.{name}" for name in top}
    for part in ("tree", "where", "schedules"):
        public = sys.modules[f"{PACKAGE}.{part}"].__all__
        known |= {_plain(name): f"sl.{part}.{name}" for name in public}
    return known | {_plain(name): f"tx.{name}(...)" for name in FLUENT if name[0] != "_"}


def _plain(name: str) -> str:
    """A name without its case and underscores, which `clip_by_global_norm` and
    `ClipByGlobalNorm` share."""
    return name.lower().replace("_", "").removesuffix("schedule")
