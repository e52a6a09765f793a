"""Errors for names that are not there, and for calls and assignments that cannot be."""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from ..fields.schedule import hyperparameter_fields
from ..methods.fluent import FLUENT
from ..protocol.parts import parts
from .calls import elsewhere, renamed, similar
from .messages import PACKAGE
from .printing import public_name

_LEFT_TO_OPTAX = (
    "assignment convex_kl_divergence cosine_distance cosine_similarity ctc_loss "
    "ctc_loss_with_forward_probs generalized_kl_divergence hinge_loss huber_loss kl_divergence "
    "l2_loss log_cosh losses matrix_inverse_pth_root multi_normal nnls ntxent perturbations "
    "power_iteration safe_softmax_cross_entropy scale_gradient second_order "
    "sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels softmax_cross_entropy "
    "softmax_cross_entropy_with_integer_labels squared_error"
)
"""Names of Optax for things that are not optimization: losses above all."""

_MODULES = (
    *("checkpoint", "codecs", "combine", "contrib", "fields", "interop"),
    *("projections", "schedules", "tree", "where", "wrappers"),
)
"""The modules whose names are suggested."""


# --- modules --------------------------------------------------------------------------------


def list_names(module: ModuleType) -> None:
    """Gives a module the list of its public names, and errors for all others."""
    names = sorted(n for n, x in vars(module).items() if n[0] != "_" and not inspect.ismodule(x))
    names = vars(module).setdefault("__all__", names)
    vars(module).update(__dir__=lambda: names, __getattr__=absent(module.__name__))


def absent(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for a module: it raises an error that suggests a name."""

    def raise_error(name: str) -> NoReturn:
        advice = "" if name.startswith("_") else _module_advice(module, name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'.{advice}", name=name)

    return raise_error


def _module_advice(module: str, name: str) -> str:
    if name in _LEFT_TO_OPTAX.split():
        return f" Slalom contains optimizers and leaves this to Optax: use `optax.{name}`."
    code_of, plain = _code_by_name(), _plain(name)
    if plain in code_of:
        code_of = {plain: code_of[plain]}
    names = [] if module == PACKAGE else getattr(sys.modules[module], "__all__", [])
    return (
        elsewhere(name)
        # Names that share a word, such as "update" or "increment", are not close.
        or similar(plain, code_of, cutoff=0.8)
        or (f" Its names are {', '.join(names)}." if names else "")
    )


def _code_by_name() -> dict[str, str]:
    """The code for each public name, by the name in lower case without underscores."""
    package = sys.modules[PACKAGE]
    code_of = {
        _plain(name): f"sl.{name}"
        for name, value in vars(package).items()
        if name[0] != "_" and (not inspect.ismodule(value) or name in _MODULES)
    }
    for module in _MODULES:
        public = sys.modules[f"{PACKAGE}.{module}"].__all__
        code_of |= {_plain(name): f"sl.{module}.{name}" for name in public}
    code_of |= {_plain(name): f"opt.{name}" for name in dir(package.Optimizer) if name[0] != "_"}
    return code_of | {_plain(name): f"tx.{name}(...)" for name in FLUENT}


def _plain(name: str) -> str:
    """A name without its case and underscores, which `clip_by_global_norm` and
    `ClipByGlobalNorm` share."""
    name = name.lower().removeprefix("projection_")
    return name.replace("_", "").removesuffix("schedule")


# --- attributes -----------------------------------------------------------------------------


def no_attribute(owner: Any, name: str, advise: Callable[[Any, str], str]) -> Any:
    """Raises the error for an attribute that an object does not have.

    **Arguments:**

    - `owner`: the object whose `__getattr__` was called.
    - `name`: the name of the attribute.
    - `advise`: a function of both that says what to write instead.
    """
    attribute = inspect.getattr_static(type(owner), name, None)
    if isinstance(attribute, property) and attribute.fget is not None:
        return attribute.fget(owner)  # raises the error for which Python looked here
    is_field = name in {field.name for field in dataclasses.fields(owner)}
    advice = "" if name[0] == "_" or is_field else advise(owner, name)
    raise AttributeError(
        f"'{type(owner).__name__}' object has no attribute '{name}'.{advice}", name=name
    )


_SEEN_IF_NEEDED = {"p": "params", "grad": "grad", "value": "value"}


def transform_advice(transform: Any, name: str) -> str:
    """Advice for an attribute that a transform does not have."""
    for part in parts(transform):
        if part.name and name in {field.name for field in hyperparameter_fields(part.module)}:
            return (
                f" Its part '{part.name}' has: write `tx[{part.name!r}].{name}`, or read "
                f'`opt.hyperparams["{name}"]` of an optimizer.'
            )
    if name in _SEEN_IF_NEEDED:
        need = _SEEN_IF_NEEDED[name]
        return f' The phases of a rule see `self.{name}` if it declares `needs = ("{need}",)`.'
    public = [n for n in dir(type(transform)) if n[0] != "_"]
    written = {n: f"tx.{n}(...)" if n in FLUENT else f"tx.{n}" for n in public}
    methods = ", ".join(sorted(FLUENT))
    return elsewhere(name) or similar(name, written) or f" Its methods are {methods}."


def optimizer_advice(optimizer: Any, name: str) -> str:
    """Advice for an attribute that an optimizer does not have."""
    internal = ("binding",)
    names = dict.fromkeys(k for kind in reversed(type(optimizer).__mro__) for k in vars(kind))
    public = ", ".join(k for k in names if k[0] != "_" and k not in internal)
    return elsewhere(name) or (
        f" Its attributes are {public}. "
        'Read hyperparameters with `opt.hyperparams["learning_rate"]` and change them with '
        "`opt = opt.with_hyperparams(learning_rate=1e-4)`. The optimizer does not hold the model."
    )


def frozen(owner: Any, name: str) -> AttributeError:
    """The error for setting an attribute of a transform or an optimizer."""
    names = [field.name for field in dataclasses.fields(owner)]
    kind, has = type(owner).__name__, name in names
    make = (
        f" Make another one, `{public_name(type(owner))}({name}=...)`, or"
        if has
        else f"{renamed(name, names)} You can"
    )
    return dataclasses.FrozenInstanceError(
        f"{kind} is immutable, so '{name}' cannot be set.{make} change the hyperparameter of an "
        f"optimizer: `opt = opt.with_hyperparams({name}=...)`."
    )


def not_callable(transform: object) -> NoReturn:
    """Raises the error for a transform that is called."""
    raise TypeError(
        f"{type(transform).__name__} is a transform, not a function. Bind it to a model, `opt = "
        "sl.Optimizer(tx, model)`, and write `model, opt = opt.step(model, grads)`. Without an "
        "optimizer, write `updates, state = tx.update(grads, state, params)`."
    )
