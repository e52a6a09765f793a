"""Learning rates that carry over from a narrow model to a wide one."""

import equinox as eqx
from jaxtyping import PyTree

from ..._core.protocol.chain import Chain, Identity
from ..._core.protocol.parts import Part, inner_transforms, transforms
from ..._core.protocol.wrapper import AbstractWrapper
from ...rules._base import AbstractTransform, advise_keywords
from ...rules.matrices.matrix_norms import ScaleByRowRms
from ...rules.measuring.monitor import CheckFinite, Monitor
from ...rules.momentum.momentum import Ema, Trace
from ...rules.shaping.clip import Clip, ClipByGlobalNorm, ZClip
from ...rules.shaping.constrain import Cautious, SetToZero
from ...rules.shaping.descent import AddDecayedWeights, ScaleByLearningRate
from ...rules.shaping.scale import Scale, ScaleBy, ScaleBySchedule
from ...where.layout import LayoutLike
from ...wrappers.gradients.graft import Graft
from .rate_factors import mup, rule_of, trainable

_AFTER = (AddDecayedWeights, ScaleByLearningRate, SetToZero)
"""The links that the factors precede if there is no rule to follow."""

_NEUTRAL = (
    *_AFTER,
    Cautious,
    CheckFinite,
    Clip,
    ClipByGlobalNorm,
    Ema,
    Identity,
    Monitor,
    Scale,
    ScaleBy,
    ScaleByRowRms,
    ScaleBySchedule,
    Trace,
    ZClip,
)
"""Links that leave the dependence of updates on the width as it is, or that SGD may have."""


@advise_keywords
def transfer(
    tx: AbstractTransform, model: PyTree, base: PyTree, layout: LayoutLike = None
) -> AbstractTransform:
    """Carries learning rates that suit a narrow model over to a wide one (μP).

    The factors of `mup` come right after each rule and before the decay, which stays as it is. Each
    rule has its own: `sl.soap(3e-3)` has those of SOAP for matrices, and Adam's for the rest.

    ```python
    >>> make = lambda width: eqx.nn.MLP(2, 1, width, depth=1, key=jax.random.key(0))
    >>> sl.contrib.transfer(sl.adamw(1e-3, weight_decay=0.1), make(64), base=make(16))
    (
        sl.ScaleByAdam()
        | sl.ScaleBy({sl.where.path('layers.1.weight'): 0.25})
        | sl.AddDecayedWeights(weight_decay=0.1)
        | sl.ScaleByLearningRate(0.001)
    )

    ```

    **Arguments:**

    - `tx`: a transform.
    - `model`: the model, or its shapes.
    - `base`: the model, or its shapes, at the width at which the learning rate was found.
    - `layout`: as in `mup`, for rules without a `layout` of their own.

    **Returns:** the transform with `sl.ScaleBy` links. A rule that `mup` does not know is refused.
    """
    wide, narrow = trainable(model), trainable(base)
    if isinstance(tx, Chain):
        return _transferred(tx, wide, narrow, layout)
    if isinstance(tx, Graft | ScaleBy) or not inner_transforms(tx):
        return _transferred(Chain((tx,), (None,)), wide, narrow, layout)
    pairs = zip(
        *(Part.root(tx, params=params).children() for params in (wide, narrow)), strict=True
    )
    for part, small in pairs:
        # Another transform than the inner one, such as the optimizer of `.outer`, is no rule.
        is_inner = not isinstance(tx, AbstractWrapper) or part.module is tx.inner
        if is_inner and isinstance(part.module, AbstractTransform):
            new = transfer(part.module, part.params, small.params, layout)
            tx = eqx.tree_at(part.get, tx, new)
    return tx


def _transferred(tx: Chain, wide: PyTree, narrow: PyTree, layout: LayoutLike) -> AbstractTransform:
    """Like `transfer`, for a chain."""
    links, names = list(tx.links), list(tx.names)
    rules = [i for i, link in enumerate(links) if _is_rule(link)]
    inside = [i for i, link in enumerate(links) if i not in rules and _has_rule(link)]
    for i, link in enumerate(links):
        if i in inside and not rules:
            part, small = (Part.root(tx, params=params).children()[i] for params in (wide, narrow))
            links[i] = transfer(link, part.params, small.params, layout)
        elif i not in rules:
            _check_neutral(link)
    if inside and not rules:
        return Chain(tuple(links), tuple(names))
    if rules:
        at = rules[-1] + 1
    else:
        after = [i for i, link in enumerate(links) if isinstance(link, _AFTER)]
        at = min(after, default=len(links))
    rule = links[rules[-1]] if rules else "sgd"
    if rules:  # a rule reads its matrices by its own layout, also inside `.graft`
        inner = (getattr(part.module, "layout", None) for part in transforms(links[rules[-1]]))
        layout = next((x for x in inner if x is not None), layout)
    factors = mup(wide, narrow, rule=rule, layout=layout)
    if factors:
        links.insert(at, ScaleBy(factors))
        names.insert(at, None)
    return Chain(tuple(links), tuple(names)) if len(links) > 1 else links[0]


def _is_rule(link: AbstractTransform) -> bool:
    return rule_of(link) is not None and not isinstance(link, Identity)


def _has_rule(link: AbstractTransform) -> bool:
    """Whether a link is a transform around a rule or a learning rate."""
    if not inner_transforms(link) or isinstance(link, ScaleBy):
        return False
    modules = (part.module for part in transforms(link))
    return any(module.sets_learning_rate or _is_rule(module) for module in modules)


def _check_neutral(link: AbstractTransform) -> None:
    for part in transforms(link):
        if not inner_transforms(part.module) and not isinstance(part.module, _NEUTRAL):
            raise ValueError(
                f"transfer does not know how large the updates of '{part.name}' are in a wider "
                "model. Write the factors after it yourself: `sl.ScaleBy(sl.contrib.mup(model, "
                "base, rule=...))`."
            )
