"""The options of a training step."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import equinox as eqx
import jax
from jax.typing import DTypeLike

from ..._core.protocol.loss import Loss
from ..._core.text.messages import check_bool, check_int
from ...tree.types import is_function

Donate: TypeAlias = Literal["opt", "all", False]
BatchArgs: TypeAlias = int | str | tuple[int | str, ...] | list[int | str] | None


def check_model_state(microbatches: int | str | None, model_state: Any) -> None:
    """Raises an error for a state of the model that several microbatches would start from."""
    if microbatches is not None and not isinstance(model_state, eqx.nn.State):
        raise ValueError(
            "`model_state` cannot be combined with `microbatches`: every microbatch would start "
            "from the same state, unless it is an `eqx.nn.State`. Leave out one of them."
        )


class TrainOptions(TypedDict, total=False):
    """The keywords of `train_step` that do not change its results, as users pass them.

    `train_step` describes them, and has their defaults.
    """

    donate: Donate
    microbatches: int | Literal["split"] | None
    batch_args: BatchArgs
    reuse_linesearch: bool
    transform_grads: Callable[[Any], Any] | None
    compute_dtype: DTypeLike | None
    sampled_loss_fn: Callable[..., tuple[Any, Any]] | None


class Options(NamedTuple):
    """All keywords of `train_step`, converted.

    As a tree, its functions are leaves, so that their arrays are traced, and all else is static.
    """

    has_aux: bool = False
    has_weight: bool = False
    donate: Donate = "opt"
    microbatches: int | Literal["split"] | None = None
    batch_args: tuple[int | str, ...] | None = None
    reuse_linesearch: bool = False
    transform_grads: Callable[[Any], Any] | None = None
    compute_dtype: str | None = None
    sampled_loss_fn: Callable[..., Any] | None = None
    has_model_state: bool = False
    """Whether the first argument of the loss is the `model_state` of a scan."""

    def check_loss(self, loss: Loss) -> None:
        """Raises an error for options that conflict with the requests of the transforms."""
        examples = "single examples" in loss.askers
        if self.batch_args is not None and self.microbatches is None and not examples:
            raise ValueError(
                "`batch_args` names the arguments that are divided into microbatches or examples, "
                "but this step does not divide the batch. Pass `microbatches=` too, or remove "
                "`batch_args`."
            )
        for what in ("single examples", "residuals"):
            if self.microbatches == "split" and what in loss.askers:
                raise ValueError(
                    f"{_REFUSED[what][0]}and takes the batch as a whole. Join its first two axes, "
                    "and pass their number: `microbatches=n`."
                )
        for what in _REFUSED:
            if what != "recalled gradient" and what in loss.askers:
                self._refuse(what)

    def check(self) -> None:
        """Raises an error for invalid values."""
        for name in ("has_aux", "has_weight", "reuse_linesearch"):
            check_bool(f"train_step.{name}", getattr(self, name))
        if self.donate is True:
            raise TypeError(DONATE_TRUE)
        if self.donate is not False and self.donate not in ("opt", "all"):
            raise TypeError(
                f"train_step.donate must be 'opt', 'all' or False, got {self.donate!r}."
            )
        if self.microbatches is not None and self.microbatches != "split":
            or_split = ", or 'split' for batches that are split already"
            check_int("train_step.microbatches", self.microbatches, 1, or_split)
        functions = {
            "transform_grads": "the gradients",
            "sampled_loss_fn": "the model, a key and the batch",
        }
        for name, takes in functions.items():
            value = getattr(self, name)
            if value is not None and not is_function(value):
                raise TypeError(f"train_step.{name} must be a function of {takes}, got {value!r}.")
        if self.reuse_linesearch:
            self._refuse("recalled gradient")

    def _refuse(self, what: str) -> None:
        """Raises an error for an option that conflicts with this request."""
        who, reasons = _REFUSED[what]
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{who}{reason}. Remove `{name}`.")


_FUNCTIONS = ("transform_grads", "sampled_loss_fn")
jax.tree_util.register_dataclass(
    Options, _FUNCTIONS, [name for name in Options._fields if name not in _FUNCTIONS]
)

_REFUSED = {
    "recalled gradient": (
        "`reuse_linesearch=True` reuses the loss and the gradient of the previous step, ",
        {
            "has_aux": "so there is no `aux` to return",
            "has_weight": "so there is no `weight` to return",
            "transform_grads": "which `transform_grads` does not change",
        },
    ),
    "combined terms": (
        "`.combine` ",
        {
            "microbatches": "weights the terms of whole batches",
            "reuse_linesearch": "changes the loss from step to step",
        },
    ),
    "single examples": (
        "The first link uses per-example gradients, ",
        {
            "has_weight": "and weights all examples equally",
            "reuse_linesearch": "but a line search knows only the gradient of their mean",
            "transform_grads": "so there is no single gradient to transform",
        },
    ),
    "residuals": (
        "This optimizer uses the residuals of the loss, ",
        {
            "compute_dtype": "whose systems need the digits of the parameters",
            "transform_grads": "not its gradients",
            "has_aux": "and such a loss returns nothing else",
            "has_weight": "and such a loss returns nothing else",
        },
    ),
}
"""The requests and the options that conflict, and why."""

DONATE_TRUE = """train_step.donate must be "opt", "all" or False, got True. Write
    sl.train_step(loss_fn, donate="opt")  # the optimizer's state; the model is kept (the default)
    sl.train_step(loss_fn, donate="all")  # the trainable parameters too"""
