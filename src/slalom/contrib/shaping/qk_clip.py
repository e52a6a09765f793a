"""Smaller queries and keys for the heads whose attention logits grow too large."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ... import fields, tree
from ..._core.fields.declare import checked_field
from ..._core.protocol.bases import AbstractStatelessTransform
from ..._core.protocol.context import Context, Merge
from ...rules._layout import warn_guessed
from ...tree.types import Params, Updates
from ...where.layout import Layout, LayoutLike, as_layout, layout_of
from ...where.masks import resolve
from ...where.resolve import Cases, Leaf, Where

_PART = re.compile(r"([1-9]\d*)?([qkvr])")
_PARTS = re.compile(r"(?:([1-9]\d*)\((.+)\)|([^()]+))")


def _parsed(role: str) -> tuple[int, tuple[tuple[str, int], ...]] | None:
    """The number of repetitions, and the letter and the share of each part."""
    match = _PARTS.fullmatch(role)
    parts = [_PART.fullmatch(p) for p in (match[2] or match[3]).split(":")] if match else [None]
    if match is None or None in parts:
        return None
    return int(match[1] or 1), tuple((p[2], int(p[1] or 1)) for p in parts if p is not None)


def _check_roles(name: str, roles: object) -> None:
    if not isinstance(roles, Cases):
        raise TypeError(
            f"{name} takes a mapping from selectors to what they select, such as "
            f"{{sl.where.path('**.wq'): 'q', sl.where.path('**.wk'): 'k'}}, got {roles!r}."
        )
    for _, role in roles.cases:
        if not isinstance(role, str) or _parsed(role) is None:
            raise ValueError(
                f"{name} has {role!r}. Write 'q' for queries, 'k' for keys, '4q:k:v' for outputs "
                "of which 4 parts are queries, then one keys and one values, and '8(2q:r)' for "
                "such parts in each of 8 heads, where r are rotary queries with shared keys."
            )


class _Outputs(NamedTuple):
    """The roles of the outputs of one leaf."""

    path: str
    layout: Layout
    layer: int
    """The number of the first layer that is in it."""
    layers: int
    """The number of layers that are stacked in it."""
    repeats: int
    parts: tuple[tuple[str, int], ...]
    """The letter of each part, and the number of its outputs in each repetition."""

    def number(self, letter: str) -> int:
        """The number of outputs of this kind."""
        return self.repeats * sum(size for kind, size in self.parts if kind == letter)

    def factors(self, powers: dict[str, Float[Array, "layers _"]]) -> Float[Array, "..."]:
        """The factor of each output, in a shape that broadcasts to the leaf."""
        columns = []
        for letter, size in self.parts:
            of_layers = powers[letter][self.layer : self.layer + self.layers]
            each = jnp.repeat(of_layers, self.repeats * size // of_layers.shape[1], axis=1)
            columns.append(each.reshape(self.layers, self.repeats, size))
        stacks, outputs = self.layout.axes("s"), self.layout.axes("o")
        shape = self.layout.shape
        ordered = jnp.concatenate(columns, axis=2).reshape([shape[a] for a in stacks + outputs])
        back = sorted(range(ordered.ndim), key=(stacks + outputs).__getitem__)
        missing = [a for a in range(len(shape)) if a not in stacks + outputs]
        return jnp.expand_dims(jnp.transpose(ordered, back), missing)


class QKClip(AbstractStatelessTransform):
    """Shrinks the queries and keys of heads whose attention logits were too large.

        γ = min(1, τ / S),   W_q ← γ^α·W_q,   W_k ← γ^(1−α)·W_k   for each head

    S is the largest logit of a head in the batch, as the loss computed it before the step. The
    logits of that head are multiplied by γ, which makes the largest one τ, apart from the step. The
    factors act on the sum of the weights and their update, so this is the last link of a chain:
    `sl.muon(0.02) | sl.contrib.QKClip(100.0, heads=8, where=where)`. With `.write` the weights in
    full precision are scaled. Heads below the limit, and those whose S is not finite, stay as they
    are. Where several heads of queries share keys, S is the largest of theirs. With normalized
    queries and keys it has no effect.

    The loss returns the logits: `(loss, {"max_logits": S})`, with `has_aux=True`. S is an array of
    layers × heads, or any tree of arrays whose last axis is the heads, with the layers in the order
    that they have in the model: the order of `jax.tree.leaves`, and in a stack the order of its
    first axis. `sl.train_step` takes the maximum over microbatches, and `.every_k` that over its
    window. Other loops pass them: `opt.step(model, grads, max_logits=S)`. Inside a `jax.shard_map`,
    take the maximum over the devices yourself, with `jax.lax.pmax`.

    ```python
    >>> class Attention(eqx.Module):
    ...     query: eqx.nn.Linear
    ...     key: eqx.nn.Linear
    ...     def __call__(self, x):  # the logits of 2 heads
    ...         q, k = (jax.vmap(f)(x).reshape(len(x), 2, -1) for f in (self.query, self.key))
    ...         return jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1])
    >>> @sl.train_step(has_aux=True)
    ... def step(model, x):
    ...     logits = jax.vmap(model)(x)
    ...     return jnp.mean(logits**2), {"max_logits": jnp.max(logits, axis=(0, 2, 3))}
    >>> where = {sl.where.path("query.*"): "q", sl.where.path("key.*"): "k"}
    >>> keys = jax.random.split(jax.random.key(0))
    >>> model = Attention(*(eqx.nn.Linear(4, 4, key=key) for key in keys))
    >>> opt = sl.Optimizer(sl.sgd(0.1) | sl.contrib.QKClip(100.0, heads=2, where=where), model)
    >>> model, opt, (loss, aux) = step(model, opt, jnp.ones((8, 3, 4)))

    ```

    **Arguments:**

    - `threshold`: τ, > 0.
    - `heads`: the number of heads of queries in each layer, an int ≥ 1.
    - `where`: a mapping from selectors to the role of the selected outputs: `"q"` queries, `"k"`
        keys. Biases belong to them too. A projection to several is written in parts, with their
        proportions: `"4q:k:v"` are queries, keys and values one after the other, where 4 heads of
        queries share keys. `"8(2q:r)"` are such parts in each of 8 heads. In latent attention, r
        are the rotary queries, whose keys all heads share: they are multiplied by γ, and the shared
        keys are not selected.
    - `alpha`: α, in [0, 1]; the share of the queries.
    - `layout`: which axes are outputs, as in `sl.where.matrix`. Blocks make no difference.

    ??? cite "Kimi Team, [Kimi K2](https://arxiv.org/abs/2507.20534), 2025"
    """

    threshold: fields.Number = fields.hyperparameter(100.0, within="(0, inf)")
    heads: int = fields.count_field(kw_only=True)
    where: Mapping[Any, str] | Where = checked_field(
        _check_roles, kw_only=True, converter=as_layout
    )
    alpha: fields.Number = fields.hyperparameter(0.5, within="[0, 1]", kw_only=True)
    layout: LayoutLike = fields.layout_field()

    needs: ClassVar[tuple[str, ...]] = ("params", "max_logits")
    constrains: ClassVar[bool] = True
    merges: ClassVar[Mapping[str, Merge]] = {
        "max_logits": Merge(
            start=lambda rule, params: jnp.zeros(
                (len(rule._groups(params)), rule.heads), tree.canonical_float()
            ),
            read=lambda logits, like: _logit_rows(logits, *like.shape),
            entry=lambda rows: rows,
        )
    }

    def init(self, params: Params) -> None:
        tree.check_inexact(params)
        self._groups(params)
        selected = tuple(outputs is not None for outputs in self._outputs(params))
        warn_guessed(self, tree.cut(params, selected))

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return tuple(None if x is None else _text(x) for x in self._outputs(params))

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params, now = self.demand("params", params), self.at(context)
        groups = self._groups(params)
        max_logits = self.demand("max_logits", context and context.max_logits)
        logits = _logit_rows(max_logits, len(groups), self.heads)
        limit, alpha = (jnp.asarray(x, logits.dtype) for x in (now.threshold, now.alpha))
        # A group is of equal size in all layers of a leaf, but not in all layers of a model.
        largest = {n: jnp.max(logits.reshape(-1, n, self.heads // n), axis=2) for n in {*groups}}

        @functools.cache
        def powers(n: int) -> dict[str, Array]:
            over = (largest[n] > limit) & jnp.isfinite(largest[n])
            ratio = jnp.where(over, limit / jnp.where(over, largest[n], 1), 1)
            ones = jnp.ones_like(ratio)
            return {"q": ratio**alpha, "k": ratio ** (1 - alpha), "r": ratio, "v": ones}

        factors = [
            () if outputs is None else (outputs.factors(powers(groups[outputs.layer])),)
            for outputs in self._outputs(params)
        ]

        def scaled(now: SimpleNamespace, u: Array, p: Array, factor: tuple[Array, ...]) -> Array:
            if not factor:
                return u
            # Selected, and not added as 0·(p + u), which may be NaN.
            return jnp.where(factor[0] == 1, u, u + (factor[0] - 1) * (p + u))

        per_param = jax.tree.structure(updates).unflatten(factors)
        return tree.map_leaves(scaled, (updates, params), per_param=(per_param,))

    def _outputs(self, params: Params) -> tuple[_Outputs | None, ...]:
        return resolve(_outputs, (self.where, self.layout), params)

    def _groups(self, params: Params) -> tuple[int, ...]:
        """For each layer the number of heads of keys."""
        return _groups(self._outputs(params), self.heads)


def _logit_rows(logits: PyTree, layers: int, heads: int) -> Float[Array, "layers heads"]:
    """The logits of all layers in one array, from `max_logits` as the loss returns it."""
    leaves = [jnp.asarray(x, tree.canonical_float()) for x in jax.tree.leaves(logits)]
    good = all(x.shape[-1:] == (heads,) for x in leaves)
    if not good or sum(x.size for x in leaves) != layers * heads:
        got = ", ".join(str(x.shape) for x in leaves)
        raise ValueError(
            f"QKClip takes `max_logits` of shape ({layers}, {heads}), the layers that `where` "
            f"selects × heads, or a tree of such arrays, got {got or 'nothing'}."
        )
    rows = [x.reshape(-1, heads) for x in leaves]
    return jnp.concatenate(rows or [jnp.zeros((0, heads), tree.canonical_float())])


def _text(outputs: _Outputs) -> str:
    names = {"q": "queries", "k": "keys", "r": "rotary queries"}
    kinds = " and ".join(names[letter] for letter, _ in outputs.parts if letter in names)
    last = outputs.layer + outputs.layers - 1
    return f"{kinds} of layer{f's {outputs.layer}–{last}' if last > outputs.layer else f' {last}'}"


def _outputs(arguments: tuple[Any, Any], leaves: list[Leaf]) -> list[_Outputs | None]:
    """The roles of the outputs of each leaf, with its layers numbered."""
    where, layout = arguments
    # Weights and biases of the same role are numbered separately.
    layers: dict[tuple[str, bool], int] = {}
    result: list[_Outputs | None] = [None] * len(leaves)
    roles = where.evaluate(leaves)
    chosen = [i for i, role in enumerate(roles) if role is not None]
    for i, of_leaf in zip(chosen, layout_of(layout, [leaves[i] for i in chosen]), strict=True):
        leaf, role = leaves[i], roles[i]
        outputs, stacks = of_leaf.axes("o"), of_leaf.axes("s")
        if not outputs:
            raise ValueError(
                f"QKClip does not know which axes of '{leaf.path}', of shape {of_leaf.shape}, are "
                f"outputs (o): write `layout={{sl.where.path({leaf.path!r}): 'oi'}}` for it."
            )
        repeats, parts = _parsed(role) or (1, ())
        size, shares = _product(of_leaf, outputs), repeats * sum(share for _, share in parts)
        if size % shares:
            raise ValueError(
                f"QKClip reads '{leaf.path}' as {role!r}, but its {size} outputs are not a "
                f"multiple of {shares}."
            )
        sizes = tuple((letter, share * (size // shares)) for letter, share in parts)
        kind, count = (role, bool(of_leaf.axes("i"))), _product(of_leaf, stacks)
        begin = layers.get(kind, 0)
        layers[kind] = begin + count
        result[i] = _Outputs(leaf.path, of_leaf, begin, count, repeats, sizes)
    if len({*layers.values()}) > 1:
        counted = ", ".join(
            f"{n} of {role!r} ({'weights' if weights else 'biases'})"
            for (role, weights), n in layers.items()
        )
        raise ValueError(
            f"QKClip needs as many layers of each kind, and `where` selects {counted}. Select all "
            "layers, or none, and stacks of layers by their layout, such as 'soi'."
        )
    return result


def _product(layout: Layout, axes: Sequence[int]) -> int:
    return math.prod(layout.shape[a] for a in axes)


@functools.lru_cache(maxsize=1024)
def _groups(outputs: tuple[_Outputs | None, ...], heads: int) -> tuple[int, ...]:
    """For each layer the number of heads of keys."""
    queries: dict[int, _Outputs] = {}
    keys: dict[int, _Outputs] = {}
    for x in filter(None, outputs):
        for letter, by_layer in (("q", queries), ("k", keys)):
            if x.number(letter):
                by_layer |= dict.fromkeys(range(x.layer, x.layer + x.layers), x)
    for which, one, other in (("keys", queries, keys), ("queries", keys, queries)):
        for i in one.keys() - other.keys():
            raise ValueError(
                f"QKClip has no {which} for '{one[i].path}'. Select them in `where` too."
            )
    groups = []
    for i, q in sorted(queries.items()):
        size, rest = divmod(q.number("q"), heads)
        if rest or not size:
            raise ValueError(
                f"QKClip reads {q.number('q')} queries in '{q.path}', which cannot be divided "
                f"into heads={heads}."
            )
        number, rest = divmod(keys[i].number("k"), size)
        if rest or not number or heads % number:
            raise ValueError(
                f"QKClip reads {q.number('q')} queries in '{q.path}', {size} in each of {heads} "
                f"heads, and {keys[i].number('k')} keys in '{keys[i].path}'. The number of heads "
                "of keys must divide the number of heads of queries."
            )
        groups.append(number)
    return tuple(groups)
