"""Errors for unexpected keywords that name the right one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

_RENAMED: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "step_size": ("learning_rate",),
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "beta_1": ("b1",),
    "beta_2": ("b2",),
    "beta": ("b1",),
    "epsilon": ("eps",),
    "wd": ("weight_decay",),
    "mask": ("decay_where",),
    "weight_decay_mask": ("decay_where",),
    "trust_ratio_mask": ("trust_ratio_where",),
    "alpha": ("decay",),
    "every_k_schedule": ("k",),
    "use_grad_mean": ("mean",),
    "should_skip_update_fn": ("skip",),
    "should_transform_fn": ("condition",),
    "projection": ("fn",),
    "seed": ("key",),
    "dtype_momentum": ("accumulator_dtype",),
    "decay_offset": ("step_offset",),
    "weight_dimension_numbers": ("layout",),
    "muon_weight_dimension_numbers": ("layout",),
}
"""Names from Optax and PyTorch, and what they are called here."""


_ELSEWHERE: dict[str, str] = {
    "amsgrad": "sl.amsgrad(learning_rate)",
    "clipnorm": "sl.ClipByGlobalNorm(1.0) | tx",
    "clipvalue": "sl.Clip(1.0) | tx",
    "ema_momentum": "tx.average(decay)",
    "global_clipnorm": "sl.ClipByGlobalNorm(1.0) | tx",
    "use_ema": "tx.average(decay)",
    "weight_decay": "sl.adamw(learning_rate, weight_decay=0.1), or sl.AddDecayedWeights(0.1) | tx",
}
"""Keywords of optimizers of PyTorch and Keras, and what has another place here."""


def renamed_advice(name: str, known: Iterable[str]) -> str:
    """What to write in place of a name that another library uses, if anything."""
    renamed = _RENAMED.get(name, ())
    return f" Write {' and '.join(renamed)}." if renamed and set(renamed) <= set(known) else ""


def keyword_advice(keyword: str, known: Iterable[str]) -> str:
    """What to write in place of a keyword that is not known."""
    known = [name for name in known if name != "self"]
    renamed = renamed_advice(keyword, known)
    if renamed:
        return renamed
    if keyword in _ELSEWHERE and "learning_rate" in known:
        return f" Write {_ELSEWHERE[keyword]}."
    close = difflib.get_close_matches(keyword, known, n=2, cutoff=0.7)
    if close:
        return f" Did you mean {' or '.join(close)}?"
    return f" It takes {', '.join(known)}." if known else " It takes none."


def check_keywords(function: Callable[..., Any], name: str, keywords: Iterable[str]) -> None:
    """Raises a `TypeError` with advice if a function does not take one of the keywords."""
    known = _keywords(function)
    if known is None or known.issuperset(keywords):
        return
    unknown = next(keyword for keyword in keywords if keyword not in known)
    names = inspect.signature(function).parameters
    raise TypeError(
        f"{name}() got an unexpected keyword '{unknown}'.{keyword_advice(unknown, names)}"
    )


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a function's parameters; `None` if it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


def advise_positions(advice: str) -> Callable[[_Function], _Function]:
    """A decorator that refuses too many arguments by position with advice. The signature stays the
    same."""

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        most = sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                # Methods are called with `self`, which nobody writes.
                own = "self" in inspect.signature(function).parameters
                raise TypeError(
                    f"{function.__name__}() takes {most - own} argument{'s' * (most - own > 1)} by "
                    f"position, got {len(args) - own}. {advice}"
                )
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def advise_keywords(function: _Function) -> _Function:
    """A decorator for `check_keywords`. The signature stays the same."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            check_keywords(function, function.__name__, kwargs)
        return function(*args, **kwargs)

    return cast(_Function, call)
