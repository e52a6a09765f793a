"""Policies for writing half-precision parameters, for which p + u rounds most updates away.

A policy keeps for each parameter what its dtype cannot hold. Its `Writer` reads the parameter
together with that, and writes both. So it acts where the updates are added, also inside a
conditional, and its idle result is what was kept.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

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


class Policy(abc.ABC):
    """How one half-precision parameter is stored and written."""

    field: ClassVar[str | None] = None
    """The field of the state with what is kept for each parameter."""
    random: ClassVar[bool] = False
    """Whether rounding is random."""
    splits: ClassVar[bool] = False
    """Whether what is kept is only what rounding takes away."""

    def init(self, params: Params) -> PyTree | None:
        """What is kept for these parameters, at first."""
        del params

    def full(self, p: Array, kept: Array | None) -> Array:
        """The parameter in float32."""
        del kept
        return p.astype(jnp.float32)

    @abc.abstractmethod
    def encode(self, x: Array, dtype: Any, seeds: Seeds | None) -> tuple[Array, Array | None]:
        """The parameter and what to keep, from its value in float32."""


class _Master(Policy):
    """A copy in float32."""

    field = "master"

    def init(self, params: Params) -> PyTree:
        return tree.copy(params, tree.accumulation_dtype)

    def full(self, p: Array, kept: Array | None) -> Array:
        assert kept is not None
        wide = p.astype(jnp.float32)
        # A parameter that was changed by others counts more than the copy.
        return jnp.where(rounding.nearest(kept, p.dtype) == wide, kept, wide)

    def encode(self, x: Array, dtype: Any, seeds: Seeds | None) -> tuple[Array, Array]:
        del seeds
        return x.astype(dtype), x


class _AbstractRemainder(Policy):
    """What rounding took away, which `taken` finds and `given_back` adds."""

    splits = True
    rounded: ClassVar[Callable[..., Array]] = staticmethod(rounding.nearest)
    taken: ClassVar[Callable[..., Array]]
    given_back: ClassVar[Callable[..., Array]]

    def full(self, p: Array, kept: Array | None) -> Array:
        return self.given_back(p, kept)

    def encode(self, x: Array, dtype: Any, seeds: Seeds | None) -> tuple[Array, Array]:
        del seeds
        rounded = self.rounded(x, dtype)
        return rounded.astype(dtype), self.taken(x, rounded, dtype)


class _Kahan(_AbstractRemainder):
    """In the parameter's dtype."""

    field = "compensation"
    taken = staticmethod(rounding.remainder)
    given_back = staticmethod(rounding.with_remainder)

    def init(self, params: Params) -> PyTree:
        return tree.zeros_like(params)


class _Ecc(_AbstractRemainder):
    """As eight more bits."""

    field = "correction"
    rounded = staticmethod(rounding.nearest_for_more_bits)
    taken = staticmethod(rounding.more_bits)
    given_back = staticmethod(rounding.with_more_bits)

    def init(self, params: Params) -> PyTree:
        return tree.zeros_like(params, lambda _: jnp.dtype(jnp.int8))


class _Stochastic(Policy):
    """Nothing: rounding is right on average."""

    random = True

    def encode(self, x: Array, dtype: Any, seeds: Seeds | None) -> tuple[Array, None]:
        assert seeds is not None
        return rounding.stochastic(x, dtype, rounding.random_bits(x, seeds)), None


POLICIES: dict[str, Policy | None] = {
    "master": _Master(),
    "kahan": _Kahan(),
    "ecc": _Ecc(),
    "stochastic": _Stochastic(),
    "nearest": None,
}


# --- their write ----------------------------------------------------------------------------


class _Encoded(NamedTuple):
    param: Array
    kept: Array | None


class PolicyWrite(Writer):
    """Adds the updates to the parameters in full precision, and encodes the sum.

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
        leaves, structure = jax.tree.flatten(params)
        values = jax.tree.leaves(sums) if self.new is None else self.new
        written: list[_Encoded] = []
        before = None
        for x, p, kept, seeds in zip(values, leaves, self.kept, self.seeds, strict=True):
            if not rounding.is_half(p.dtype):
                written.append(_Encoded(tree.cast(x, tree.canonical(p.dtype)), kept))
                continue
            wide = tree.cast(x, jnp.dtype(jnp.float32))
            if self.policy.splits:
                before, rest = _split_in_place(self.policy, wide, p, kept, before)
                written.append(_Encoded(before, rest))
            else:
                written.append(_Encoded(*_encode(self.policy, jnp.dtype(p.dtype), wide, seeds)))
        return structure.unflatten(written)

    def full(self, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, self.kept, strict=True)
        return structure.unflatten([self._full(p, kept) for p, kept in pairs])

    def at_rest(self, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, self.kept, strict=True)
        return structure.unflatten([self._at_rest(p, kept) for p, kept in pairs])

    def _at_rest(self, p: Array, kept: Array | None) -> Array | Encoded:
        if not rounding.is_half(p.dtype):
            return p
        arrays = {"param": p} if kept is None else {"param": p, "kept": kept}
        codec = _AsCodec(self.policy, jnp.dtype(p.dtype))
        return Encoded(arrays, codec, p.shape, jnp.dtype(jnp.float32), False)

    def in_place(self, params: Params | None) -> PyTree | None:
        return None if self.policy.random or self.new is not None else self.at_rest(params)

    def from_place(self, written: PyTree) -> PyTree:
        def split_up(x: Any) -> _Encoded:
            if not is_encoded(x):
                return _Encoded(x, None)
            # A narrow leaf has the shape in which codecs see it.
            arrays = {name: reshaped(a, x.shape) for name, a in x.arrays.items()}
            return _Encoded(arrays["param"], arrays.get("kept"))

        return jax.tree.map(split_up, written, is_leaf=is_encoded)

    def _full(self, p: Array, kept: Array | None) -> Array:
        return _decode(self.policy, p, kept) if rounding.is_half(p.dtype) else p

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        del shapes
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten(map(_Encoded, leaves, self.kept))

    def plain(self, result: PyTree) -> Params:
        return split(result)[0]

    def new_params(self, params: Params, result: PyTree) -> Params:
        del params
        return jax.tree.map(lambda x: self._full(*x), result, is_leaf=_is_encoded)

    def assigning(self, new: Params) -> Writer:
        return PolicyWrite(self.name, self.kept, self.seeds, jax.tree.leaves(new))

    @property
    def returning(self) -> Writer:
        return Return(self)

    def cut(self, keep: tuple[bool, ...]) -> Writer:
        def kept(column: Any) -> Any:
            return None if column is None else [x for x, k in zip(column, keep, strict=True) if k]

        return PolicyWrite(self.name, *map(kept, (self.kept, self.seeds, self.new)))

    def onto(self, policy: Writer) -> Writer:
        raise AssertionError("`Write` refuses another one inside it")

    def __str__(self) -> str:
        return f'"{self.name}"'


class _AsCodec(NamedTuple):
    """A policy as a codec, for the engine: one parameter together with what is kept of it."""

    policy: Policy
    dtype: Any

    def encode(self, x: Array, spec: Any, bits: Any = None) -> dict[str, Any]:
        del spec, bits
        param, kept = self.policy.encode(x, self.dtype, None)
        return {"param": param} if kept is None else {"param": param, "kept": kept}

    def decode(self, arrays: dict[str, Any], spec: Any) -> Array:
        del spec
        return self.policy.full(arrays["param"], arrays.get("kept"))

    def is_elementwise(self, spec: Any) -> bool:
        del spec
        return True


# Shared by the leaves of one shape, since tracing takes time in Python.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(policy: Policy, dtype: Any, x: Array, seeds: Seeds | None) -> Any:
    return policy.encode(x, dtype, seeds)


@functools.partial(jax.jit, static_argnums=0)
def _decode(policy: Policy, p: Array, kept: Array | None) -> Array:
    return policy.full(p, kept)


@functools.partial(jax.jit, static_argnums=0)
def _split_in_place(
    policy: Policy, x: Array, p: Array, kept: Array, before: Array | None
) -> tuple[Array, Array | None]:
    """As `encode`, on a CPU after the parameter `before` was written.

    XLA:CPU makes a kernel of each result. Both would read the old parameter, what was kept, and
    whatever the update is made of, so that XLA would copy some of that and keep the rest, for all
    parameters at once. As the operand of a conditional the sum is written to memory instead, and
    both results are written in place from it. It is not computed before the parameter before this
    one was written, so that there is only one sum at a time.
    """
    first = p if before is None else before
    if x.size == 0 or first.size == 0 or any(s is not None for s in jax.typeof(x).sharding.spec):
        return policy.encode(x, p.dtype, None)

    def on_cpu(x: Array, p: Array, kept: Array, first: Array) -> tuple[Array, Array | None]:
        bits = jax.lax.bitcast_convert_type(first[(0,) * first.ndim], jnp.uint16)
        always = bits.astype(jnp.int32) >= 0  # which XLA does not know
        x = jnp.where(always, x, 0)
        return jax.lax.cond(
            always, lambda x, *_: policy.encode(x, p.dtype, None), lambda _, *same: same, x, p, kept
        )

    def elsewhere(x: Array, p: Array, kept: Array, _: Array) -> tuple[Array, Array | None]:
        return policy.encode(x, p.dtype, None)

    return jax.lax.platform_dependent(x, p, kept, first, cpu=on_cpu, default=elsewhere)


def split(result: PyTree) -> tuple[PyTree, list[Array | None]]:
    """A result without what is kept, and this for each parameter."""
    pairs = [x for x in jax.tree.leaves(result, is_leaf=_is_encoded) if _is_encoded(x)]

    def strip(x: Any) -> Any:
        return x.param if _is_encoded(x) else x

    return jax.tree.map(strip, result, is_leaf=_is_encoded), [pair.kept for pair in pairs]


def _is_encoded(x: Any) -> bool:
    return isinstance(x, _Encoded)
