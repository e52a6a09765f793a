"""What the transforms of an optimizer ask of the loss of a training step."""

from typing import Any, NamedTuple

from ...tree.types import Params
from ..state.walk import parts
from .context import Context
from .parts import Part
from .traits import AbstractTraits

_ELSEWHERE = ("value_fn", "grad_fn", "sampled_grad_fn", "residuals")
"""What a transform needs that evaluates the loss at parameters of its own."""

_PAIRS = {
    ("scaled", "scaled"): (
        "Two parts of this optimizer call `.scale_loss()`, but there is only one loss. Call it "
        "once, on the whole optimizer: `tx.scale_loss()`."
    ),
    ("scaled", "residuals"): (
        "'{name}' computes its updates from the residuals of the loss, which `.scale_loss()` does "
        "not scale. Remove `.scale_loss()`, and keep the parameters in float32."
    ),
    ("combined", "combined"): (
        "Two parts of this optimizer call `.combine(...)`, but a step has one gradient. Call it "
        "once, on the whole optimizer."
    ),
    ("combined", "scaled"): (
        "`.combine` weights the gradients of the loss itself, so they cannot be scaled. Remove "
        '`.scale_loss()`, and compute in bfloat16, with `compute_dtype="bfloat16"`.'
    ),
    ("combined", "examples"): "`.combine` cannot combine per-example gradients. Remove it.",
    **{
        ("combined", need): (
            "'{name}' evaluates the loss itself, and does not know the weights of its terms, so it "
            "cannot be inside `.combine` or beside it. Weight the terms in the loss, or use "
            "another transform."
        )
        for need in _ELSEWHERE
    },
    **{
        ("sampled", need): (
            "'{name}' evaluates the loss at parameters of its own, but this optimizer learns a "
            "posterior from gradients at its samples. Use one of the two."
        )
        for need in _ELSEWHERE
    },
}
"""What cannot be asked of one loss, and why. The name is that of the part that asks the second."""


class Loss(NamedTuple):
    """The loss of a training step, as the transforms of an optimizer ask for it.

    `transform.ask` maps it to another one. The step then computes one gradient for all of them.

    | what is asked | by |
    |---|---|
    | `"scaled"`: the gradients of a multiple of the loss | `.scale_loss()` |
    | `"sampled"`: gradients at a sample of the parameters | `sl.contrib.ivon` |
    | `"examples"`: the gradients of single examples | a first link that is `per_example` |
    | `"combined"`: the gradient of a weighted sum of its terms | `.combine` |
    | `"recalled"`: the gradient that the last step has computed | a line search at the end |
    | an entry of the context | every transform that `needs` it |

    **Arguments:**

    - `asked`: what is asked, with the part that asks for it.
    - `first`, `last`: whether the transform that is asked is the first or last link.
    """

    asked: tuple[tuple[str, Part], ...] = ()
    first: bool = True
    last: bool = True

    def asking(self, what: str, part: Part) -> "Loss":
        """This loss, of which a part asks one thing more."""
        for other, by in self.asked:
            for pair, second in (((what, other), by), ((other, what), part)):
                if pair in _PAIRS:
                    raise ValueError(_PAIRS[pair].format(name=second.name))
        return self._replace(asked=(*self.asked, (what, part)))

    def by(self, what: str) -> tuple[Part, ...]:
        """The parts that ask for this."""
        return tuple(part for name, part in self.asked if name == what)

    def inside(self, here: Part, *, in_sequence: bool = False) -> "Loss":
        """This loss, as the transforms inside a part ask for it.

        **Arguments:**

        - `here`: the part.
        - `in_sequence`: whether they are the links of a chain.
        """
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
        if not here.module.passes_gradients and loss.by("scaled") != self.by("scaled"):
            raise ValueError(
                f"{type(here.module).__name__} is outside `.scale_loss()`, so it would use "
                "gradients that are still multiplied by the scale. Call `.scale_loss()` last, on "
                "the whole optimizer: `tx.scale_loss()`."
            )
        return loss._replace(first=self.first, last=self.last)


def asked(
    transform: AbstractTraits,
    state: Any = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Loss:
    """What a transform and its parts ask of the loss, with what they see in this step."""
    root: Any = next(parts(transform, state, context, params))
    return root.module.ask(root, Loss())
