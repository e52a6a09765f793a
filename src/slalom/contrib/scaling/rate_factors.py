"""Factors of the learning rate that follow from a model's layers and shapes, for `ScaleBy`."""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ... import tree
from ..._core.fields.declare import check_number
from ..._core.protocol.chain import Identity
from ..._core.protocol.transform import AbstractTransform
from ...rules._layout import warn_if_guessed
from ...rules.adaptive.adam import AbstractAdam, ScaleByAdam
from ...rules.adaptive.more_means import ScaleByAdan
from ...rules.low_memory.adafactor import ScaleByFactoredRms
from ...rules.low_memory.rms import ScaleByRms, ScaleByStddev
from ...rules.matrices.kron import ScaleByKron
from ...rules.matrices.orthogonalize import Orthogonalize
from ...rules.matrices.shampoo import ScaleByShampoo
from ...rules.matrices.soap import AbstractInEigenbasis, ScaleBySoap
from ...rules.momentum.sign import ScaleByLion, ScaleBySign
from ...tree.paths import dotted, glob_pattern, leaf_paths
from ...tree.types import WhereLike
from ...where.layout import Layout, LayoutLike, Matrix, as_layout, check_layout, layouts
from ...where.masks import mask
from ...where.resolve import Leaf, Where, as_where
from ...where.selectors import path as at_path
from ..matrices.dion import ScaleByDion

# --- layer-wise decay -------------------------------------------------------------------------


def layerwise_decay(
    model: PyTree, decay: float, *, layers: Sequence[WhereLike] | None = None
) -> dict[Where, float]:
    """Factors for `sl.ScaleBy` that decay from the last layer to the first.

    The last of n + 1 layers has the factor 1, and layer i the factor decayⁿ⁻ⁱ. For fine-tuning: the
    first layers change less.

    ```python
    >>> model = eqx.nn.MLP(2, 1, width_size=4, depth=2, key=jax.random.key(0))
    >>> sl.contrib.layerwise_decay(model, 0.5)
    {sl.where.path('layers.0.**'): 0.25, sl.where.path('layers.1.**'): 0.5}
    >>> tx = sl.adamw(1e-3) | sl.ScaleBy(sl.contrib.layerwise_decay(model, 0.5))

    ```

    The entries of a list or tuple in the model are layers, in order. What comes before the first
    list, such as an embedding, is one layer before them; everything after the last one, such as a
    final norm and the head, is one layer after them, and so is everything between two lists.
    Embeddings always come first. A list inside an entry of a list belongs to that entry.

    **Arguments:**

    - `model`: the model, or its shapes.
    - `decay`: the factor from one layer to the previous one, in (0, 1].
    - `layers`: a selector for each layer, first to last, for a model that is not made of lists, or
        in which they are in another order. Parameters that none of them selects keep the factor 1,
        as do those of the last one.

    **Returns:** a mapping from selectors to factors, without those that are 1.

    ??? cite "Howard & Ruder, [Universal Language Model Fine-tuning for Text
        Classification](https://arxiv.org/abs/1801.06146), 2018"
    """
    decay = float(check_number("The decay of layerwise_decay", decay, "(0, 1]"))
    params = trainable(model)
    if layers is not None and not isinstance(layers, Sequence):
        raise TypeError(f"`layers` of layerwise_decay must be a list of selectors, got {layers!r}.")
    ordered = _layers(params) if layers is None else [as_where(where) for where in layers]
    if not ordered:
        raise ValueError("layerwise_decay got no layers. Pass a selector for each: `layers=[...]`.")
    if layers is not None:
        for where in ordered:
            if not any(mask(where, params)):
                raise ValueError(f"{where!r} in layerwise_decay matches no parameter.")
    last = len(ordered) - 1
    return {where: decay ** (last - i) for i, where in enumerate(ordered) if i < last}


def _layers(params: PyTree) -> list[Where]:
    """A selector for each layer, first to last."""
    key_paths = [key_path for key_path, _ in jax.tree_util.tree_leaves_with_path(params)]
    in_lists = [key_path for key_path in key_paths if _entry(key_path)]
    if not in_lists:
        raise ValueError(
            "layerwise_decay found no list of layers in this model. Pass a selector for each "
            "layer, first to last: `layers=[sl.where.path('embedding.**'), ...]`."
        )
    first: list[str] = []
    groups: list[tuple[str | None, list[str]]] = []
    for key_path in key_paths:
        entry = _entry(key_path)
        outside = entry or _outside(key_path, in_lists, params)
        if entry is None and (not groups or _in_embedding(params, key_path)):
            first.append(outside)
            continue
        if not groups or groups[-1][0] != entry:
            groups.append((entry, []))
        groups[-1][1].append(outside)
    return [_union(paths) for paths in (first, *(paths for _, paths in groups)) if paths]


def _entry(key_path: tuple[Any, ...]) -> str | None:
    """The path of the entry of a list that a leaf belongs to, if any."""
    for n, key in enumerate(key_path):
        if isinstance(key, jax.tree_util.SequenceKey):
            return dotted(key_path[: n + 1])
    return None


def _outside(key_path: tuple[Any, ...], in_lists: list[Any], params: PyTree) -> str:
    """The path at which a leaf parts from all lists."""
    n = 1
    while any(other[:n] == key_path[:n] for other in in_lists):
        n += 1
    if isinstance(key_path[n - 1], jax.tree_util.DictKey) and not _in_embedding(params, key_path):
        raise ValueError(
            f"layerwise_decay cannot tell whether '{dotted(key_path[:n])}' is before or after the "
            "layers, since a dict has no order. Pass a selector for each layer, first to last: "
            "`layers=[sl.where.path('embedding.**'), ...]`."
        )
    return dotted(key_path[:n])


def _in_embedding(params: PyTree, key_path: tuple[Any, ...]) -> bool:
    leaf = Leaf(dotted(key_path), jax.ShapeDtypeStruct((), np.float32), key_path, params)
    return any(isinstance(node, eqx.nn.Embedding) for node in leaf.ancestors())


def _union(paths: Iterable[str]) -> Where:
    """A selector of everything at or below these paths."""
    return functools.reduce(operator.or_, (at_path(f"{p}.**") for p in dict.fromkeys(paths)))


# --- maximal update parametrization -----------------------------------------------------------


def mup(
    model: PyTree,
    base: PyTree,
    *,
    rule: str | AbstractTransform = "adam",
    layout: LayoutLike = None,
) -> dict[Where, float]:
    """Factors for `sl.ScaleBy` that make a learning rate of a narrow model suit a wide one.

    This is the learning rate of the maximal update parametrization, μP. For an array whose inputs
    and outputs are r_in and r_out times as many as in the base model, the factor is

        1 / r_in                     "adam", and other rules that divide by the size of the gradient
        r_out / r_in                 "sgd", with or without momentum
        √(r_out / r_in)              "muon", for orthogonal updates: `Orthogonalize(scale=None)`
        √(r_out / r_in)              "soap" and "kron" with both factors
        √(r_out / r_in / blocks)     "shampoo", with the growth of the number of blocks

    Hidden matrices have r_in = r_out = r, those that read the data or an embedding r_in = 1, and
    the last layer r_out = 1. Biases, norms and embeddings have no inputs that grow. What is not a
    matrix has Adam's factor with all rules but `"sgd"`.

    You can also pass a rule itself, such as `sl.ScaleBySoap(max_size=512)`. Its factors then follow
    from its fields: an `Orthogonalize` with `scale="spectral"` needs none, and one with
    `"match_rms_adamw"` a smaller one. In `"soap"` and `"kron"` a side of length n without a factor
    of its own contributes another factor of 1 / √n. Both transfer less exactly than the others:
    their first updates are larger in wider models. What is grafted has the factor of the magnitude.
    `sl.contrib.transfer(tx, model, base)` finds the rules of an optimizer, and puts all factors in
    place.

    ```python
    >>> def make(width):
    ...     return eqx.nn.MLP(2, 1, width, depth=2, key=jax.random.key(0))
    >>> model, base = make(64), eqx.filter_eval_shape(make, 16)
    >>> sl.contrib.mup(model, base)
    {sl.where.path('layers.1.weight') | sl.where.path('layers.2.weight'): 0.25}
    >>> tx = sl.adam(1e-3) | sl.ScaleBy(sl.contrib.mup(model, base))

    ```

    With weight decay, put it right after the rule, so that the decay is the same for all widths, as
    `sl.contrib.transfer(sl.adamw(1e-3), model, base)` does.

    Learning rates are a part of μP. The initial values are up to you: the variance of hidden
    weights must fall as 1 / inputs, as it does in Equinox's layers, and for the last layer as 1 /
    inputs² (or start it at 0). Attention must divide by the size of a head, not by its root.

    **Arguments:**

    - `model`: the model, or its shapes.
    - `base`: the model, or its shapes, at the width at which the learning rate was found. Both have
        the same layers.
    - `rule`: `"adam"`, `"sgd"`, `"muon"`, `"soap"`, `"kron"` or `"shampoo"`, or a transform.
    - `layout`: the layout of arrays that would otherwise be read wrongly: a mapping from selectors
        to layouts, such as `{sl.where.path("w"): "io"}`. Defaults to the rule's.

    **Returns:** a mapping from selectors to factors, without those that are 1.

    ??? cite "Yang et al., [Tensor Programs V: Tuning Large Neural Networks via Zero-Shot
        Hyperparameter Transfer](https://arxiv.org/abs/2203.03466), 2022 (Table 3); Qiu et al.,
        [Hyperparameter Transfer Enables Consistent Gains of Matrix-Preconditioned Optimizers Across
        Scales](https://arxiv.org/abs/2512.05620), 2025 (Table 1), for the rules over matrices"
    """
    transform = _RULES[rule]() if isinstance(rule, str) and rule in _RULES else rule
    known_rule = rule_of(transform)
    if known_rule is None:
        names = ", ".join(map(repr, _RULES))
        raise ValueError(f"The rule of mup must be one of {names}, or such a rule, got {rule!r}.")
    stated = as_layout(getattr(rule, "layout", None) if layout is None else layout)
    if stated is not None:
        check_layout("layout", stated)
    params, narrow = trainable(model), trainable(base)
    paths, others = leaf_paths(params), leaf_paths(narrow)
    if paths != others:
        missing = next((p for p in (*paths, *others) if (p in paths) != (p in others)), "")
        where = "the model" if missing in paths else "the base model"
        raise ValueError(
            f"mup needs two models with the same layers, but '{missing}' is only in {where}."
        )
    by_factor: dict[float, list[str]] = {}
    pairs = zip(layouts(params, stated), layouts(narrow, stated), strict=True)
    for path, (wide, small) in zip(paths, pairs, strict=True):
        inputs, outputs = _growth(path, wide, small, "ik"), _growth(path, wide, small, "o")
        if inputs != outputs:
            warn_if_guessed("mup", "sl.contrib.mup", path, wide)
        factors = [
            _factor(known_rule, inputs, outputs, one.matrix, other.matrix)
            for one, other in zip(wide.blocks, small.blocks, strict=True)
        ]
        factor = factors[0]
        if not all(math.isclose(other, factor) for other in factors):
            raise ValueError(
                f"mup has no factor for '{path}': its blocks of unequal sizes need different ones. "
                "Choose a rule whose factor does not depend on the shape of a matrix, such as "
                '`sl.Orthogonalize(scale="spectral")`, or split the parameter in the model.'
            )
        if not math.isclose(factor, 1):
            by_factor.setdefault(factor, []).append(path)
    return {
        functools.reduce(operator.or_, map(at_path, _globs(chosen, paths))): factor
        for factor, chosen in by_factor.items()
    }


_RULES: dict[str, Callable[[], AbstractTransform]] = {
    "adam": ScaleByAdam,
    "sgd": Identity,
    "muon": lambda: Orthogonalize(scale=None),
    "soap": ScaleBySoap,
    "kron": ScaleByKron,
    "shampoo": ScaleByShampoo,
}

_LIKE_ADAM = (
    AbstractAdam,
    ScaleByAdan,
    ScaleByFactoredRms,
    ScaleByLion,
    ScaleByRms,
    ScaleBySign,
    ScaleByStddev,
)
_ORTHOGONAL = (Orthogonalize, ScaleByDion)
_OVER_MATRICES = (AbstractInEigenbasis, *_ORTHOGONAL, ScaleByKron, ScaleByShampoo)


def rule_of(link: object) -> AbstractTransform | None:
    """The rule that decides how large the updates of a link are, if `mup` knows it."""
    link = getattr(link, "magnitude", link)  # of a `Graft`
    return link if isinstance(link, (Identity, *_LIKE_ADAM, *_OVER_MATRICES)) else None


def _factor(
    rule: AbstractTransform,
    inputs: float,
    outputs: float,
    wide: Matrix | None,
    small: Matrix | None,
) -> float:
    """The factor of one array, whose inputs and outputs have grown by these numbers."""
    if isinstance(rule, Identity):
        return outputs / inputs
    if isinstance(rule, _OVER_MATRICES) and wide is not None and small is not None:
        if isinstance(rule, _ORTHOGONAL):
            return math.sqrt(outputs / inputs) * rule.factor(small) / rule.factor(wide)
        both = (wide.rows, wide.columns), (small.rows, small.columns)
        if isinstance(rule, ScaleByShampoo):
            now, before = (math.prod(-(-n // rule.block_size) for n in sides) for sides in both)
            return math.sqrt(outputs / inputs * before / now)
        now, before = (math.prod(n for n in sides if n <= rule.max_size) for sides in both)
        return math.sqrt(now / before) / inputs
    return 1 / inputs


def _globs(chosen: list[str], paths: list[str]) -> Iterable[str]:
    """Globs for some of the paths, with `*` for the index of a layer if all layers are alike."""
    globs = []
    for path in chosen:
        glob = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        alike = all(p in chosen for p in paths if glob_pattern(glob).fullmatch(p))
        globs.append(glob if alike else path)
    return dict.fromkeys(globs)


def _growth(path: str, wide: Layout, small: Layout, letters: str) -> float:
    """The number of inputs or outputs of an array, over that in the base model."""
    if wide.letters is None or small.letters is None:
        raise ValueError(
            f"mup does not know which axes of '{path}' are outputs and which are inputs. Pass its "
            f'layout: `layout={{sl.where.path({path!r}): "..."}}`.'
        )
    sizes = [math.prod(one.shape[a] for a in one.axes(letters)) for one in (wide, small)]
    return sizes[0] / sizes[1] if all(sizes) else 1.0


def trainable(model: PyTree) -> PyTree:
    """The floating and complex arrays of a model, or arrays of these shapes that take no memory."""

    def array(x: PyTree) -> PyTree:
        if isinstance(x, jax.ShapeDtypeStruct):
            x = np.broadcast_to(np.zeros((), x.dtype), x.shape)
        return x if tree.is_inexact(x) else None

    return jax.tree.map(array, model)
