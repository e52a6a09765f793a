"""Half-precision parameters that keep small updates."""

import dataclasses
import functools
import zlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, PyTree, UInt32

from ... import fields, tree
from ..._core.engine.encoded import Encoded, is_encoded
from ..._core.fields.keys import AbstractKeyed, key_field
from ..._core.protocol.bases import AbstractParameterWriter, params_to_evaluate
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part, instances
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer, without_kept
from ...codecs._codec import AbstractCodec
from ...tree import rounding
from ...tree.sharding import reshaped
from ...tree.types import Params

Seeds = tuple[UInt32[Array, ""], UInt32[Array, ""]]
"""The seeds of the random bits of a parameter."""


class WriteState(eqx.Module):
    """The state of `Write`. Of the last three fields at most one is not `None`, and that has
    arrays for half-precision parameters only."""

    inner: PyTree
    """The inner transform's state."""
    master: PyTree[Float32[Array, "..."]] | None = fields.param_like("exact")
    """Under `"master"`, the parameters."""
    compensation: PyTree[Float[Array, "..."]] | None = fields.param_like("exact")
    """Under `"kahan"`, the rounding error, in units in which it is as large as the parameter at
    most: times 2⁸ for bfloat16, and 2¹¹ for float16."""
    correction: PyTree[Int8[Array, "..."]] | None = fields.param_like("exact")
    """Under `"ecc"`, the rounding error, in 2⁻⁸ of the parameter's unit in the last place."""


class Write(AbstractKeyed, AbstractWrapper[WriteState], AbstractParameterWriter[WriteState]):
    """The inner transform, with a policy for writing half-precision parameters.

    Made by `tx.write`, which describes the arguments.

    A bfloat16 number has 8 significant bits, so p + u is p again for all |u| < 2⁻⁹·|p|, and
    training stalls. A policy adds the updates to parameters in float32, and splits the sum into the
    parameter and what its dtype cannot hold:

    | policy | the state has | bytes per parameter | significant bits |
    |---|---|---|---|
    | `"master"` | a copy in float32 | 4 | 24 |
    | `"kahan"` | what rounding took away, in the parameter's dtype | 2 | 16 (float16: 22) |
    | `"ecc"` | what rounding took away, as eight bits | 1 | 16 (float16: 19) |
    | `"stochastic"` | nothing; it rounds at random, so that the mean is right | 0 | 8 (11) |
    | `"nearest"` | nothing, and rounds to nearest, as without `.write` | 0 | 8 (11) |

    The rules inside see the parameters in float32, so weight decay and distances are as exact as
    the policy. Parameters of other dtypes, such as float32 and complex64, are written as without
    `.write`. A parameter that was changed outside the optimizer keeps its new value: the copy
    under `"master"` starts again from it. What rounding took away before stays under `"kahan"` and
    `"ecc"`, and moves it by at most half a unit in its last place.

    The policy acts where the updates are added, so `.write` means the same inside and outside
    `.every_k` and `.if_finite`. Put it outside `.project`, `.lookahead`, `.flatten` and
    `.split_complex`. Groups of a partition may have different policies. `opt.update` is refused
    for half-precision parameters, because updates that were rounded to their dtype are lost when
    they are added. `opt.eval_params(model, full_precision=True)` returns the parameters in float32.

    The random bits of `"stochastic"` are a hash of the key, the step, the path of the parameter,
    and the index of the element. They take no memory, and do not depend on the sharding.

    ```python
    >>> model = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> opt = sl.Optimizer(sl.sgd(1e-3).write("kahan"), model)
    >>> for _ in range(10):
    ...     model, opt = opt.step(model, {"w": jnp.ones(2, jnp.bfloat16)})
    >>> model["w"]
    Array([0.988281, 0.988281], dtype=bfloat16)

    ```

    ??? cite "Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
        2018, for master weights; Zamirai et al., [Revisiting BFloat16
        Training](https://arxiv.org/abs/2010.06192), 2020, for Kahan summation and stochastic
        rounding"
    """

    over: ClassVar[str] = "tree"
    passes_gradients: ClassVar[bool] = True
    reads_encoded: ClassVar[tuple[str, ...]] = ("updates",)

    policy: str = fields.choice_field(
        "master", "kahan", "ecc", "stochastic", "nearest", required=True
    )
    key: Any = key_field(default=0)

    def __check_init__(self):
        for part in instances(self.inner, Write):
            raise ValueError(
                f"`.write({self.policy!r})` wraps a transform that contains "
                f"`.write({part.module.policy!r})`. Parameters are written once: remove one "
                "of them, or write each group of a partition with a policy of its own."
            )

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """The inputs that the step must have: its number, if rounding is random."""
        return ("step",) if self.policy == "stochastic" else ()

    def init(self, params: Params) -> WriteState:
        tree.check_inexact(params)
        halves = tree.cut(params, _are_half(params))
        kept: dict[str, Any] = dict.fromkeys(("master", "compensation", "correction"))
        if self.policy == "master":
            kept["master"] = tree.copy(halves, tree.accumulation_dtype)
        elif self.policy == "kahan":
            kept["compensation"] = tree.zeros_like(halves)
        elif self.policy == "ecc":
            kept["correction"] = tree.zeros_like(halves, lambda _: jnp.dtype(jnp.int8))
        return WriteState(inner=self.inner.init(params), **kept)

    def run(self, here: Part, write: Writer, updates: PyTree) -> tuple[Any, WriteState]:
        state, context, params = here.state, here.context, here.params
        if not self._acts_on(updates if params is None else params):
            result, inner = self.inner_part(here).run(write, updates)
            return result, dataclasses.replace(state, inner=inner)
        if not write.adds:
            raise TypeError(
                f'`.write("{self.policy}")` writes half-precision parameters itself: updates that '
                "are rounded to their dtype would be lost when they are added. Write "
                "`model, opt = opt.step(model, grads)` instead of `opt.update(model, grads)`. A "
                "transform around `.write` must pass its own `write` on."
            )
        inner_write = write.onto(self._write(state, params, context))
        # Losses are those of the model, which has the parameters rounded.
        rounded = context.in_form(lambda full: full, lambda full: tree.cast_like(full, params))
        seen = rounded.replace(shardings=context.shardings)
        result, inner = self.inner_part(here._replace(context=seen)).run(inner_write, updates)
        encoded = filter(is_encoded, jax.tree.leaves(result, is_leaf=is_encoded))
        kept = [x.arrays["kept"] for x in encoded if "kept" in x.arrays]
        new = jax.tree.structure(_kept(state)).unflatten(kept)
        return without_kept(result), dataclasses.replace(new, inner=inner)

    def _acts_on(self, params: Params) -> bool:
        return self.policy != "nearest" and any(_are_half(params))

    def _write(self, state: WriteState, params: Params, context: Context) -> Writer:
        kept = iter(jax.tree.leaves(_kept(state)))

        def with_kept(p: Array) -> Encoded:
            arrays = {"param": p}
            if self.policy != "stochastic":
                arrays["kept"] = next(kept)
            codec = _Policy(self.policy, jnp.dtype(p.dtype), p.shape)
            return Encoded(arrays, codec, p.shape, jnp.dtype(jnp.float32), False)

        halves = zip(jax.tree.leaves(params), _are_half(params), strict=True)
        encoded = [with_kept(p) if is_half else None for p, is_half in halves]
        seeds = None
        if self.policy == "stochastic":
            step = self.demand("step", context.step)
            seeds = _seeds([step, *jnp.atleast_1d(self.key)], tree.leaf_paths(params))
        return Writer(encoded=encoded, seeds=seeds)

    def eval_params(self, here: Part) -> Params:
        full, inner = self._evaluated(here)
        # Leaves that no inner transform evaluates elsewhere are those of the model, bit by bit.
        return jax.tree.map(lambda x, f, p: p if x is f else x, inner, full, here.params)

    def full_params(self, here: Part) -> Params:
        return self._evaluated(here)[1]

    def _evaluated(self, here: Part) -> tuple[Params, Params]:
        """The parameters in full precision, and those to evaluate."""
        full = here.params
        if self._acts_on(full):
            full = self._write(here.state, full, Context(step=0)).full(full)
        inner = self.inner_part(here)._replace(params=full)
        return full, params_to_evaluate(inner, full_precision=True)


def _kept(state: WriteState) -> WriteState:
    return dataclasses.replace(state, inner=None)


def refuse_written(inner: AbstractTransform, call: str) -> None:
    """Raises an error for a wrapper that writes parameters in place of a policy inside it.

    **Arguments:**

    - `inner`: the transform inside the wrapper.
    - `call`: the call that makes the wrapper, such as `".project(...)"`.
    """
    for part in instances(inner, Write):
        write = f".write({part.module.policy!r})"
        raise ValueError(
            f"`{call}` changes the parameters itself, so it cannot be around `{write}`, which "
            f"keeps them in full precision. Change the order: `tx{call}{write}`. In a "
            "partition, do so in each group."
        )


def _are_half(params: Params) -> tuple[bool, ...]:
    return tuple(rounding.is_half(tree.canonical(x.dtype)) for x in jax.tree.leaves(params))


def _seeds(numbers: list[Any], paths: list[str]) -> list[Seeds]:
    """Two seeds for each parameter, from some integers and its path."""
    first, second = jnp.uint32(0x9E3779B9), jnp.uint32(0x85EBCA6B)
    for number in numbers:
        first = rounding.scramble(first ^ jnp.asarray(number).astype(jnp.uint32))
        second = rounding.scramble(second + first)
    seeds = []
    for path in paths:
        hashed = np.uint32(zlib.crc32(path.encode()))
        seeds.append((rounding.scramble(first ^ hashed), rounding.scramble(second ^ hashed)))
    # Behind a barrier the kernels of equal parameters are equal, and XLA compiles them once.
    return jax.lax.optimization_barrier(seeds)


# --- how parameters are encoded -------------------------------------------------------------


class _Policy(AbstractCodec):
    """A codec of a half-precision parameter with what its dtype cannot hold.

    Its arrays are the parameter, `"param"`, and the rest, `"kept"`.

    **Arguments:**

    - `name`: the name of the policy.
    - `dtype`, `shape`: those of the parameter.
    """

    name: str = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def encode(self, x: Array, spec: Any, bits: Any = None) -> dict[str, Array]:
        x, dtype = reshaped(x, self.shape), self.dtype
        if self.name == "stochastic":
            return {"param": rounding.stochastic(x, dtype, bits)}
        if self.name == "master":
            return {"param": x.astype(dtype), "kept": x}
        if self.name == "kahan":
            rounded = rounding.nearest(x, dtype)
            kept = rounding.remainder(x, rounded, dtype)
        else:
            rounded = rounding.nearest_for_more_bits(x, dtype)
            kept = rounding.more_bits(x, rounded, dtype)
        return {"param": rounded.astype(dtype), "kept": kept}

    def decode(self, arrays: dict[str, Any], spec: Any) -> Array:
        if self.name == "kahan":
            return rounding.with_remainder(arrays["param"], arrays["kept"])
        if self.name == "ecc":
            return rounding.with_more_bits(arrays["param"], arrays["kept"])
        wide = arrays["param"].astype(jnp.float32)
        if self.name == "stochastic":
            return wide
        # A parameter that was changed by others counts more than the copy.
        kept = arrays["kept"]
        return jnp.where(rounding.nearest(kept, self.dtype) == wide, kept, wide)

    def is_elementwise(self, spec: Any) -> bool:
        return True

    def written(
        self, old: Encoded, x: Array, seeds: Seeds | None, before: Encoded | None
    ) -> Encoded:
        """An encoded leaf with a new parameter.

        **Arguments:**

        - `old`: the leaf that it replaces.
        - `x`: the parameter in float32.
        - `seeds`: the seeds of the random bits, if rounding is random.
        - `before`: the leaf that was written before, if there is one.
        """
        if self.name in ("kahan", "ecc"):
            return _encoded_in_place(old, x, (before or old).arrays["param"])
        return _encoded(old.form, x, seeds)


# Shared by the leaves of one shape, since tracing takes time in Python.


@functools.partial(jax.jit, static_argnums=0)
def _encoded(form: tuple[Any, ...], x: Array, seeds: Seeds | None = None) -> Encoded:
    bits = None if seeds is None else rounding.random_bits(x, seeds)
    return Encoded(form[0].encode(x, None, bits), *form)


@jax.jit
def _encoded_in_place(old: Encoded, x: Array, before: Array) -> Encoded:
    """As `_encoded`, on a CPU after the parameter `before` was written.

    XLA:CPU makes a kernel of each result. Both would read the old parameter, what was kept, and
    whatever the update is made of, so that XLA would copy some of that and keep the rest, for all
    parameters at once. As the operand of a conditional the sum is written to memory instead, and
    both results are written in place from it. It is not computed before the parameter before this
    one was written, so that there is only one sum at a time.
    """

    def fresh(x: Array, old: Encoded, *_: Array) -> Encoded:
        return _encoded(old.form, x)

    def on_cpu(x: Array, old: Encoded, before: Array) -> Encoded:
        bits = jax.lax.bitcast_convert_type(before[(0,) * before.ndim], jnp.uint16)
        always = bits.astype(jnp.int32) >= 0  # which XLA does not know
        return jax.lax.cond(always, fresh, lambda _, same: same, jnp.where(always, x, 0), old)

    if x.size == 0 or before.size == 0 or any(s is not None for s in jax.typeof(x).sharding.spec):
        return fresh(x, old)
    return jax.lax.platform_dependent(x, old, before, cpu=on_cpu, default=fresh)
