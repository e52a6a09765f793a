"""The requests of an optimizer's transforms to the loss of a training step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Array, Bool

from ...tree.types import Params, PyTree, Scalar, Updates
from .context import Context
from .parts import AbstractTraits, Part

_ELSEWHERE = ("value_fn", "grad_fn", "sampled_grad_fn", "residuals")
"""The inputs of transforms that evaluate the loss at parameters of their own."""

_PAIRS = {
    ("scaled loss", "scaled loss"): (
        "Two parts of this optimizer call `.scale_loss()`, but there is only one loss. Call it "
        "once, on the whole optimizer: `tx.scale_loss()`."
    ),
    ("scaled loss", "residuals"): (
        "'{name}' computes its updates from the residuals of the loss, which `.scale_loss()` does "
        "not scale. Remove `.scale_loss()`, and keep the parameters in float32."
    ),
    ("combined terms", "combined terms"): (
        "Two parts of this optimizer call `.combine(...)`, but a step has one gradient. Call it "
        "once, on the whole optimizer."
    ),
    ("combined terms", "scaled loss"): (
        "`.combine` weights the gradients of the loss itself, so they cannot be scaled. Remove "
        '`.scale_loss()`, and compute in bfloat16, with `compute_dtype="bfloat16"`.'
    ),
    ("combined terms", "single examples"): (
        "`.combine` cannot combine per-example gradients. Remove it."
    ),
    **{
        ("combined terms", need): (
            "'{name}' evaluates the loss itself, and does not know the weights of its terms, so it "
            "cannot be inside `.combine` or beside it. Weight the terms in the loss, or use "
            "another transform."
        )
        for need in _ELSEWHERE
    },
    **{
        ("private gradients", need): (
            "'{name}' uses the loss beside the noisy gradients, so the steps would not be "
            "differentially private. Remove '{name}', or use a clip without noise."
        )
        for need in ("grad", "max_logits", *_ELSEWHERE)
    },
    **{
        ("sampled parameters", need): (
            "'{name}' evaluates the loss at parameters of its own, but this optimizer learns a "
            "posterior from gradients at its samples. Use one of the two."
        )
        for need in _ELSEWHERE
    },
}
"""Pairs of requests that one loss cannot serve, and the reason. The name is that of the part with
the second request."""


OTHER_LOSSES = (
    *_ELSEWHERE,
    "terms",
    "negated loss",
    "scaled loss",
    "sampled parameters",
    "single examples",
    "combined terms",
)
"""What is asked by transforms that use more of a loss than its value and one gradient."""


class Loss(NamedTuple):
    """The loss of a training step, as the transforms of an optimizer ask for it.

    `transform.ask` maps it to another one. The step then computes one gradient for all of them.

    | what is asked | by |
    |---|---|
    | `"negated loss"`: its negative, which it computes itself | `.maximize()` |
    | `"scaled loss"`: the gradients of a multiple of it | `.scale_loss()` |
    | `"sampled parameters"`: gradients at a sample of them | `sl.contrib.ivon` |
    | `"single examples"`: their gradients | a first link that is `per_example` |
    | `"private gradients"`: no other function of the loss | `sl.DifferentiallyPrivateAggregate` |
    | `"combined terms"`: the gradient of a weighted sum of them | `.combine` |
    | `"recalled gradient"`: that of the last step, if it is known | a line search at the end |
    | an entry of the context | every transform that `needs` it |

    **Arguments:**

    - `askers`: what is asked, with the parts that ask for it.
    - `first`, `last`: whether the transform that is asked is the first or last link.
    """

    askers: Mapping[str, tuple[Part, ...]] = MappingProxyType({})
    first: bool = True
    last: bool = True

    def request(self, what: str, part: Part) -> "Loss":
        """This loss with one more request of a part."""
        for other, (first, *_) in self.askers.items():
            for pair, second in (((what, other), first), ((other, what), part)):
                if pair in _PAIRS:
                    raise ValueError(_PAIRS[pair].format(name=second.name))
        return self._replace(askers={**self.askers, what: (*self.askers.get(what, ()), part)})

    def recalled(self) -> tuple[Scalar, Updates, Bool[Array, ""]] | None:
        """The loss and the gradient that a line search kept, and whether it has any, or `None`
        without such a search."""
        searches = self.askers.get("recalled gradient", ())
        return next((part.module.recall(part.state) for part in searches), None)

    def inside(self, here: Part) -> "Loss":
        """This loss, as the transforms inside a part ask for it."""
        in_sequence = here.module.in_sequence
        inner = [part for part in here.children() if isinstance(part.module, AbstractTraits)]
        loss: Any = self
        for i, part in enumerate(inner):
            loss = part.module.ask(
                part._replace(path=here.path + part.path),
                loss._replace(
                    first=in_sequence and self.first and i == 0,
                    last=in_sequence and self.last and i == len(inner) - 1,
                ),
            )
        is_scaled = "scaled loss" in loss.askers and "scaled loss" not in self.askers
        if is_scaled and not here.module.passes_gradients:
            raise ValueError(
                f"{type(here.module).__name__} is outside `.scale_loss()`, so it would use "
                "gradients that are still multiplied by the scale. Call `.scale_loss()` last, on "
                "the whole optimizer: `tx.scale_loss()`."
            )
        return loss._replace(first=self.first, last=self.last)


def loss_of(
    transform: AbstractTraits,
    state: PyTree = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Loss:
    """The requests of a transform and its parts, which see this step's context."""
    root = Part.root(transform, state, context, params)
    return root.module.ask(root, Loss())
