"""Stores state in fewer bits."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ... import fields, tree
from ..._core.engine.encoded import Encoded, has_encoded, is_encoded
from ..._core.engine.manual_axes import refuse_shards
from ..._core.methods.fluent import AbstractFluent
from ..._core.protocol.parts import Part
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ..._core.state.marks import COPY, EXACT, NONNEGATIVE, PARAM_LIKE
from ..._core.state.slots import Slot, slots
from ..._core.text.messages import listed
from ..._core.text.printing import Call, code, method_call
from ...codecs.names import as_codec, offload
from ...tree.paths import candidates, glob_pattern, has_suffix, leaf_paths
from ...tree.sharding import to_device, to_host, to_memory_of
from ...tree.types import Params, Tracer
from ...where.masks import mask
from ...where.resolve import Where, as_where_or_none


class StoreState(eqx.Module):
    """The state of `Store`."""

    inner: PyTree
    """The inner transform's state, with encoded leaves."""
    count: Int[Array, "*runs"]
    """The number of steps, which stochastic rounding hashes."""


class Codecs(NamedTuple):
    """A mapping from fields to codecs that hashes."""

    pairs: tuple[tuple[str, Any], ...]


def _as_codecs(codecs: object) -> object:
    return Codecs(tuple(codecs.items())) if isinstance(codecs, Mapping) else codecs


class Store(AbstractWrapper[StoreState]):
    """The inner transform, with its state stored in fewer bits.

    Made by `tx.store`, which describes the arguments.

    The state that has the shape of the parameters, such as moments and accumulators, is stored in a
    codec. It is decoded where the inner transform reads it and encoded where it writes, inside any
    conditional. The updates are computed from the new moments: with `"bfloat16"` as they are
    stored, with the other codecs before they are encoded.

    Fields that hold parameters or must be exact stay as they are unless they are named: slow
    weights, averages, initial parameters, the memory of L-BFGS and of line searches. So do state of
    other shapes, such as Adafactor's factors, and leaves with fewer than `min_size` entries.

    Rules decode one leaf after the other, so that a step needs scratch memory for the largest one.
    Matrix rules, rules that sum over their new state, and other transforms decode all leaves at
    once.

    `opt.rebind(model, tx=...)` changes the codec of a running optimizer.

    ??? cite "Dettmers et al., [8-bit Optimizers via Block-wise
        Quantization](https://arxiv.org/abs/2110.02861), 2021"
    """

    over: ClassVar[str] = "number"
    passes_gradients: ClassVar[bool] = True
    reads_encoded: ClassVar[tuple[str, ...]] = ("state", "updates")

    codec: Any = eqx.field(static=True, converter=_as_codecs)
    where: Where | None = eqx.field(default=None, static=True, converter=as_where_or_none)
    min_size: int = fields.count_field(4096, kw_only=True)

    def __check_init__(self):
        for name, codec in self._codecs():
            if not isinstance(name, str):
                raise TypeError(
                    "`.store` takes a codec, or a mapping from names of fields to codecs, such as "
                    f"{{'mu': 'bfloat16'}}, got {name!r} as a name. To choose parameters, write "
                    "`tx.store(codec, where=selector)`."
                )
            as_codec(f"The codec of '{name}'" if name else "Store.codec", codec)

    def _codecs(self) -> tuple[tuple[str, Any], ...]:
        """The codecs by field; `""` stands for all that are not exact."""
        return self.codec.pairs if isinstance(self.codec, Codecs) else (("", self.codec),)

    def _code(self) -> Call:
        codec = dict(self.codec.pairs) if isinstance(self.codec, Codecs) else self.codec
        return method_call(self, self.inner, AbstractFluent.store, codec=codec)

    def init(self, params: Params) -> StoreState:
        state = self.inner.init(params)
        leaves, structure = jax.tree.flatten(state, is_leaf=is_encoded)
        places = slots(self.inner, state, leaf_paths(params), is_encoded)
        for i, codec in self._chosen(params, leaves, places, self.min_size).items():
            leaves[i] = _stored(places[i], leaves[i], codec)
        return StoreState(structure.unflatten(leaves), tree.fresh_count())

    def warnings(self, params: Params) -> Iterator[str]:
        # Without their memory: JAX does not multiply an array on the host by one on the device.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        state = jax.eval_shape(self.inner.init, shapes)
        leaves = jax.tree.leaves(state, is_leaf=is_encoded)
        places = slots(self.inner, state, leaf_paths(params), is_encoded)
        if not jax.tree.leaves(params) or self._chosen(params, leaves, places, self.min_size):
            return
        fields = [slot.field for slot in places if slot.mark == PARAM_LIKE]
        smaller = self._chosen(params, leaves, places, least=1)
        if smaller:
            largest = max(math.prod(leaves[i].shape) for i in smaller)
            why = (
                f"its largest leaf has {largest} entries, and `min_size` is {self.min_size}. To "
                "store smaller ones, pass `min_size=1`"
            )
        elif fields and self.where is not None:
            why = f"{self.where!r} selects no parameter with such state. Select others"
        elif fields:
            names = listed(dict.fromkeys(map(repr, fields)), 3)
            why = (
                f"its fields {names} stay as they are unless they are named. Remove it, or name "
                "them: `.store({name: codec})`"
            )
        else:
            why = "it has none that is shaped like the parameters. Remove it"
        yield f"`.store` changes nothing of the state of this transform: {why}."

    def run(self, here: Part, write: Writer, updates: PyTree) -> tuple[Any, StoreState]:
        state = here.state
        if has_encoded(state.inner):
            refuse_shards("Store", updates if here.params is None else here.params)
        count = tree.increment(state.count)
        here = here._replace(context=here.context.replace(stored_clock=count))
        part = self.inner_part(here)._replace(state=to_device(state.inner))
        result, inner = part.run(write, updates)
        return result, StoreState(to_memory_of(state.inner, inner), count)

    def _chosen(
        self, params: Params, leaves: list[Any], places: list[Slot], least: int
    ) -> dict[int, Any]:
        """The codec of each leaf that has one and at least so many entries, by position."""
        shaped = {i: slot for i, slot in enumerate(places) if slot.mark == PARAM_LIKE}
        field_of = {i: f"{s.node[0]}.{s.field}".lstrip(".") for i, s in shaped.items()}
        selected = None
        if self.where is not None:
            keep = mask(self.where, params)
            selected = {p for p, k in zip(leaf_paths(params), keep, strict=True) if k}
        codec_of: dict[int, Any] = {}
        for name, stated in self._codecs():
            codec = as_codec("The codec", stated)
            named = {i for i, field in field_of.items() if _is_named(name, field)}
            if name and not named and field_of:
                raise ValueError(
                    f"`.store` names the field '{name}', which is not in the state of this "
                    f"transform. Its fields: {candidates(name, sorted(set(field_of.values())))}."
                )
            for i in sorted(named - codec_of.keys()):
                slot = places[i]
                if not name and slot.stored in (EXACT, COPY) and not isinstance(codec, offload):
                    continue
                if selected is not None and slot.param not in selected:
                    continue
                if math.prod(leaves[i].shape) >= least:
                    codec_of[i] = codec
        return codec_of


def _is_named(name: str, field: str) -> bool:
    return not name or has_suffix(field, name) or bool(glob_pattern(name).fullmatch(field))


def _stored(slot: Slot, x: PyTree, codec: Any) -> PyTree:
    """A leaf of the initial state in its codec."""
    if isinstance(codec, offload):
        return jax.tree.map(lambda a: _offloaded(slot, a, codec.memory_kind), x)
    if is_encoded(x):
        raise ValueError(
            f"'{slot.name}' is already stored in {code(x.codec)} by an inner `.store`. Store each "
            "field once."
        )
    form = Encoded({}, codec, x.shape, np.dtype(x.dtype), slot.stored == NONNEGATIVE)
    try:
        codec.check(form.spec)
    except ValueError as error:
        raise ValueError(f"'{slot.name}' cannot be stored: {error}") from None
    plain = None if jnp.iscomplexobj(x) else codec.plain_dtype(form.spec)
    if plain is not None:
        return x.astype(plain)
    # Compiled, so that the arrays are sharded like the leaf, and values are written once.
    return jax.jit(form.encode)(x)


def _offloaded(slot: Slot, x: PyTree, memory_kind: str) -> PyTree:
    """An array in another memory."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return to_host(x) if memory_kind == "pinned_host" else x
    kinds = sorted(m.kind for m in next(iter(x.sharding.device_set)).addressable_memories())
    if memory_kind not in kinds:
        raise ValueError(
            f"'{slot.name}' cannot be stored in the memory {memory_kind!r}, which the backend "
            f"'{jax.default_backend()}' does not have. Its memories: {', '.join(map(repr, kinds))}."
        )
    return jax.device_put(x, x.sharding.with_memory_kind(memory_kind))
