"""Policies for writing half-precision parameters, for which p + u rounds most updates away.

A policy is a codec: it keeps for each parameter what its dtype cannot hold. Its `Writer` decodes
both, adds the update, and encodes the sum. So it acts where the updates are added, also inside a
conditional, and its idle result is what was kept.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32

from ... import tree
from ...tree import rounding
from ...tree.sharding import reshaped
from ...tree.types import Params
from ..protocol.writer import Return, Writer
from .encoded import Encoded, is_encoded

Seeds = tuple[UInt32[Array, ""], UInt32[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """A codec for one half-precision parameter and the digits that its dtype cannot hold.

    **Arguments:**

    - `dtype`, `shape`: those of the parameter.
    """

    dtype: Any
    shape: tuple[int, ...]

    field: ClassVar[str | None] = None
    """The field of the state that holds the extra data of each parameter."""
    random: ClassVar[bool] = False
    """Whether rounding is random."""
    splits: ClassVar[bool] = False
    """Whether the extra data are only the rounding error."""

    @staticmethod
    def init(params: Params) -> PyTree | None:
        """The initial extra data of these parameters."""
        del params

    @abc.abstractmethod
    def split(self, x: Array, bits: Any) -> dict[str, Array]:
        """Splits a value in float32 into the parameter `"param"` and its extra data `"kept"`."""

    def encode(self, x: Array, spec: Any, bits: Any = None) -> dict[str, Array]:
        del spec
        return self.split(reshaped(x, self.shape), bits)

    def decode(self, arrays: dict[str, Any], spec: Any) -> Array:
        del spec
        return arrays["param"].astype(jnp.float32)

    def is_elementwise(self, spec: Any) -> bool:
        del spec
        return True


class _Master(Policy):
    """Keeps a copy in float32."""

    field = "master"

    @staticmethod
    def init(params: Params) -> PyTree:
        return tree.copy(params, tree.accumulation_dtype)

    def decode(self, arrays: dict[str, Any], spec: Any) -> Array:
        wide, kept = arrays["param"].astype(jnp.float32), arrays["kept"]
        # A parameter that was changed by others counts more than the copy.
        return jnp.where(rounding.nearest(kept, self.dtype) == wide, kept, wide)

    def split(self, x: Array, bits: Any) -> dict[str, Array]:
        return {"param": x.astype(self.dtype), "kept": x}


class _AbstractRemainder(Policy):
    """Keeps the rounding error: `taken` computes it, and `given_back` adds it."""

    splits = True
    rounded: ClassVar[Callable[..., Array]] = staticmethod(rounding.nearest)
    taken: ClassVar[Callable[..., Array]]
    given_back: ClassVar[Callable[..., Array]]

    def decode(self, arrays: dict[str, Any], spec: Any) -> Array:
        return self.given_back(arrays["param"], arrays["kept"])

    def split(self, x: Array, bits: Any) -> dict[str, Array]:
        rounded = self.rounded(x, self.dtype)
        kept = self.taken(x, rounded, self.dtype)
        return {"param": rounded.astype(self.dtype), "kept": kept}


class _Kahan(_AbstractRemainder):
    """Keeps the rounding error in the parameter's dtype."""

    field = "compensation"
    taken = staticmethod(rounding.remainder)
    given_back = staticmethod(rounding.with_remainder)

    @staticmethod
    def init(params: Params) -> PyTree:
        return tree.zeros_like(params)


class _Ecc(_AbstractRemainder):
    """Keeps eight more bits of each parameter."""

    field = "correction"
    rounded = staticmethod(rounding.nearest_for_more_bits)
    taken = staticmethod(rounding.more_bits)
    given_back = staticmethod(rounding.with_more_bits)

    @staticmethod
    def init(params: Params) -> PyTree:
        return tree.zeros_like(params, lambda _: jnp.dtype(jnp.int8))


class _Stochastic(Policy):
    """Keeps nothing: rounding is right on average."""

    random = True

    def split(self, x: Array, bits: Any) -> dict[str, Array]:
        return {"param": rounding.stochastic(x, self.dtype, bits)}


POLICIES: dict[str, type[Policy] | None] = {
    "master": _Master,
    "kahan": _Kahan,
    "ecc": _Ecc,
    "stochastic": _Stochastic,
    "nearest": None,
}


# --- their write ----------------------------------------------------------------------------


class PolicyWrite(Writer):
    """Adds the updates to the parameters in full precision, and encodes the sum.

    The result has an encoded leaf for each half-precision parameter.

    **Arguments:**

    - `name`: the name of the policy, for errors.
    - `kept`: what is kept of each parameter; `None` where the policy keeps nothing.
    - `seeds`: of the random bits of each parameter, if there are any.
    - `new`: full parameters to write in place of the sum.
    """

    def __init__(
        self,
        name: str,
        kept: Sequence[Array | None],
        seeds: Sequence[Seeds | None],
        new: Sequence[Array] | None = None,
    ):
        policy = POLICIES[name]
        assert policy is not None
        self.name, self.policy, self.kept, self.seeds, self.new = name, policy, kept, seeds, new

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        sums = tree.add(self.full(params), updates)
        old, structure = jax.tree.flatten(self.at_rest(params), is_leaf=is_encoded)
        values = jax.tree.leaves(sums) if self.new is None else self.new
        written: list[Any] = []
        before = None
        for x, p, seeds in zip(values, old, self.seeds, strict=True):
            if not is_encoded(p):
                written.append(tree.cast(x, tree.canonical(p.dtype)))
                continue
            wide = tree.cast(x, jnp.dtype(jnp.float32))
            if self.policy.splits:
                written.append(_encode_in_place(p, wide, before))
                before = written[-1].arrays["param"]
            else:
                written.append(_encode(p.form, wide, seeds))
        return structure.unflatten(written)

    def full(self, params: PyTree) -> PyTree:
        return _full(self.at_rest(params))

    def at_rest(self, params: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, self.kept, strict=True)
        return structure.unflatten([self._at_rest(p, kept) for p, kept in pairs])

    def _at_rest(self, p: Array, kept: Array | None) -> Array | Encoded:
        if not rounding.is_half(p.dtype):
            return p
        arrays = {"param": p} if kept is None else {"param": p, "kept": kept}
        codec = self.policy(jnp.dtype(p.dtype), p.shape)
        return Encoded(arrays, codec, p.shape, jnp.dtype(jnp.float32), False)

    def in_place(self, params: Params | None) -> PyTree | None:
        return None if self.policy.random or self.new is not None else self.at_rest(params)

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        del shapes
        return self.at_rest(params)

    def plain(self, result: PyTree) -> Params:
        return split(result)[0]

    def new_params(self, params: Params, result: PyTree) -> Params:
        del params
        return _full(result)

    def assigning(self, new: Params) -> Writer:
        return PolicyWrite(self.name, self.kept, self.seeds, jax.tree.leaves(new))

    @property
    def returning(self) -> Writer:
        return Return(self)

    def cut(self, keep: tuple[bool, ...]) -> Writer:
        def kept(column: PyTree) -> PyTree:
            return None if column is None else [x for x, k in zip(column, keep, strict=True) if k]

        return PolicyWrite(self.name, *map(kept, (self.kept, self.seeds, self.new)))

    def __str__(self) -> str:
        return f'"{self.name}"'


# Shared by the leaves of one shape, since tracing takes time in Python.


def _full(result: PyTree) -> Params:
    return jax.tree.map(lambda x: _decode(x) if is_encoded(x) else x, result, is_leaf=is_encoded)


@jax.jit
def _decode(x: Encoded) -> Array:
    return x.decode()


@functools.partial(jax.jit, static_argnums=0)
def _encode(form: tuple[Any, ...], x: Array, seeds: Seeds | None) -> Encoded:
    bits = None if seeds is None else rounding.random_bits(x, seeds)
    return Encoded(form[0].split(x, bits), *form)


@jax.jit
def _encode_in_place(old: Encoded, x: Array, before: Array | None) -> Encoded:
    """As `_encode`, on a CPU after the parameter `before` was written.

    XLA:CPU makes a kernel of each result. Both would read the old parameter, what was kept, and
    whatever the update is made of, so that XLA would copy some of that and keep the rest, for all
    parameters at once. As the operand of a conditional the sum is written to memory instead, and
    both results are written in place from it. It is not computed before the parameter before this
    one was written, so that there is only one sum at a time.
    """
    first = old.arrays["param"] if before is None else before
    if x.size == 0 or first.size == 0 or any(s is not None for s in jax.typeof(x).sharding.spec):
        return _encode(old.form, x, None)

    def on_cpu(x: Array, old: Encoded, first: Array) -> Encoded:
        bits = jax.lax.bitcast_convert_type(first[(0,) * first.ndim], jnp.uint16)
        always = bits.astype(jnp.int32) >= 0  # which XLA does not know
        x = jnp.where(always, x, 0)
        return jax.lax.cond(
            always, lambda x, old: _encode(old.form, x, None), lambda _, same: same, x, old
        )

    def elsewhere(x: Array, old: Encoded, _: Array) -> Encoded:
        return _encode(old.form, x, None)

    return jax.lax.platform_dependent(x, old, first, cpu=on_cpu, default=elsewhere)


def split(result: PyTree) -> tuple[PyTree, list[Array]]:
    """Separates the written parameters from their extra data, where there are any."""
    coded = [x for x in jax.tree.leaves(result, is_leaf=is_encoded) if is_encoded(x)]

    def strip(x: PyTree) -> PyTree:
        return x.arrays["param"] if is_encoded(x) else x

    kept = [x.arrays["kept"] for x in coded if "kept" in x.arrays]
    return jax.tree.map(strip, result, is_leaf=is_encoded), kept
