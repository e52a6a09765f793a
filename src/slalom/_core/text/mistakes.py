"""What to write instead, for attributes that transforms do not have and calls that they do not
take."""

import dataclasses
import difflib
import inspect
from typing import Any, NoReturn

from ..fields.declare import hyperparameter_fields
from ..methods.fluent import FLUENT
from ..state.walk import parts
from .advice import renamed_advice

_INSTEAD = {
    "accumulate": "tx.every_k(k)",
    "apply": "opt.step(model, grads), or tx.update(grads, state, params)",
    "apply_updates": "sl.apply_updates(model, updates)",
    "chain": "tx | other",
    "clip": "sl.ClipByGlobalNorm(1.0) | tx",
    "clip_by_global_norm": "sl.ClipByGlobalNorm(1.0) | tx",
    "ema": "tx.average(decay)",
    "every": "tx.every_k(k)",
    "freeze": "sl.Optimizer(tx, model, trainable=~where)",
    "multi_steps": "tx.every_k(k)",
    "polyak": "tx.average()",
    "schedule": "sl.adam(sl.schedules.cosine_decay(1e-3, steps))",
    "skip_nan": "tx.if_finite(n)",
    "state_dict": "sl.checkpoint.save(path, model=model, opt=opt)",
    "swa": "tx.average()",
    "then": "tx | other",
    "with_ema": "tx.average(decay)",
    "weight_decay": "sl.adamw(1e-3, weight_decay=0.1)",
    "zero_grad": "nothing: JAX does not accumulate gradients",
}
"""What to write instead of methods that people expect, often from another library."""


def no_attribute(transform: Any, name: str) -> Any:
    """Raises the error for an attribute that a transform does not have."""
    message = f"'{type(transform).__name__}' object has no attribute '{name}'."
    own = inspect.getattr_static(type(transform), name, None)
    if isinstance(own, property) and own.fget is not None:
        return own.fget(transform)  # for the error inside it, which brought Python here
    is_field = name in {field.name for field in dataclasses.fields(transform)}
    advice = "" if name[0] == "_" or is_field else _advice(transform, name)
    raise AttributeError(message + advice, name=name)


def _advice(transform: Any, name: str) -> str:
    holders = [
        part.name
        for part in parts(transform)
        if part.name and name in {field.name for field in hyperparameter_fields(part.module)}
    ]
    if holders:
        return (
            f" Its part '{holders[0]}' has: write `tx[{holders[0]!r}].{name}`, or read "
            f'`opt.hyperparams["{name}"]` of an optimizer.'
        )
    if name in _INSTEAD:
        return f" Write {_INSTEAD[name]}."
    public = [n for n in dir(type(transform)) if n[0] != "_"]
    close = difflib.get_close_matches(name, public, n=2, cutoff=0.7)
    if not close:
        return f" Its methods are {', '.join(sorted(n for n in FLUENT if n[0] != '_'))}."
    written = (f"tx.{n}(...)" if n in FLUENT else f"tx.{n}" for n in close)
    return f" Did you mean {' or '.join(written)}?"


def frozen(transform: Any, name: str) -> AttributeError:
    """The error for setting an attribute of a transform."""
    names = [field.name for field in dataclasses.fields(transform)]
    kind, has = type(transform).__name__, name in names
    renamed = renamed_advice(name, names)
    make = f" Make another one, `sl.{kind}({name}=...)`, or" if has else f"{renamed} You can"
    return dataclasses.FrozenInstanceError(
        f"{kind} is immutable, so '{name}' cannot be set.{make} change the hyperparameter of an "
        f"optimizer: `opt = opt.with_hyperparams({name}=...)`."
    )


def not_callable(transform: Any) -> NoReturn:
    """Raises the error for a transform that is called."""
    raise TypeError(
        f"{type(transform).__name__} is a transform, not a function. Bind it to a model, `opt = "
        "sl.Optimizer(tx, model)`, and write `model, opt = opt.step(model, grads)`. Without an "
        "optimizer, write `updates, state = tx.update(grads, state, params)`."
    )
