"""Losses whose curvature is known by rows: what Gauss–Newton rules see of a loss.

A loss of outputs z (residuals, logits, log-amplitudes) is linearized as rows ρ and J with

    ∇f = Jᵀρ,   ∇²f ≈ JᵀJ

over the real parameters, of which a complex one counts as two. Such losses are in
`slalom/_loop/residual_losses/`: each returns blocks, and the rest of this file is the same for
all of them.
"""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Inexact, PyTree

from ... import tree
from ...tree.dtypes import sum_dtype
from ...tree.types import Scalar, Updates


class Local(NamedTuple):
    """What the outputs of a block say about its part of the loss."""

    value: Scalar
    cotangents: Float[Array, "examples outputs"]
    """The derivative of the value with respect to the outputs."""
    factors: Float[Array, " examples"] | Float[Array, "examples outputs outputs"]
    """What multiplies the Jacobian of the outputs of each example: a number, or a symmetric
    matrix."""
    vector: Float[Array, "examples outputs"] | None
    """ρ, or `None` if the gradient is not known to be of the form Jᵀρ."""


class AbstractBlock(eqx.Module):
    """A part of a loss: a map from one example to outputs, and what the outputs say."""

    rows: eqx.AbstractVar[PyTree]
    """The data, with a leading axis of examples. `None` if the block is not a map over them."""

    centred: ClassVar[bool] = False
    """Whether the mean over the examples is subtracted from the Jacobian."""

    @abc.abstractmethod
    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        """The real outputs of one example."""

    @abc.abstractmethod
    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        """The value and the curvature at these outputs."""

    @property
    def size(self) -> int:
        """The number of examples."""
        leaves = jax.tree.leaves(self.rows)
        return leaves[0].shape[0] if leaves else 1


class Residuals(eqx.Module):
    """A loss as a function of the parameters, which can be linearized by rows.

    `loss_fn.on(*args)` makes it from a loss of `sl.LeastSquares`, `sl.OutputLoss` or
    `sl.VariationalEnergy` and its data. A transform that `needs` `"residuals"` finds it in
    `context.residuals`, as a function of the parameters that the transform sees.

    **Arguments:**

    - `blocks`: the parts of the loss.
    - `outward`: functions from the parameters to the model, which are called one after the other.
    """

    blocks: tuple[AbstractBlock, ...]
    outward: tuple[Callable[[Any], Any], ...] = eqx.field(default=(), static=True)
    searchable: bool = eqx.field(default=True, static=True)
    """Whether `value` is the loss at other parameters too."""

    def of(self, outward: Callable[[Any], Any]) -> "Residuals":
        """The same loss as a function of parameters that `outward` maps to these."""
        return Residuals(self.blocks, (outward, *self.outward), self.searchable)

    def value(self, params: PyTree) -> Scalar:
        """The loss."""
        return self.at(params, linear=False).value

    def at(self, params: PyTree, *, linear: bool = True) -> "Linearization":
        """The linearization at these parameters.

        **Arguments:**

        - `params`: the parameters.
        - `linear`: whether it is used for more than its value and vector.
        """
        return Linearization(self, params, linear)


class Linearization:
    """The loss near some parameters. All its vectors and matrices are real, in at least float32."""

    def __init__(self, residuals: Residuals, params: PyTree, linear: bool = True):
        self.params = params
        self.blocks = residuals.blocks
        self._outward = residuals.outward
        leaves = [x for x in jax.tree.leaves(params) if tree.is_inexact(x)]
        self.dtype = sum_dtype(leaves)
        """The dtype of all its arrays."""
        self.num_params = sum(real_size(x) for x in leaves)
        """P, the number of real parameters."""
        self._pullback = None
        if linear:
            outputs, self._pullback = jax.vjp(self._outputs, params)
        else:
            outputs = self._outputs(params)
        self.outputs: list[Array] = outputs
        self._local = [b.local(z) for b, z in zip(self.blocks, outputs, strict=True)]
        self.num_rows = sum(math.prod(z.shape) for z in outputs)
        """N, the number of rows."""

    @property
    def value(self) -> Scalar:
        """The loss."""
        return sum((x.value for x in self._local[1:]), self._local[0].value)

    @property
    def vector(self) -> Float[Array, " rows"] | None:
        """ρ, or `None` if the gradient is not known to be of the form Jᵀρ."""
        if any(x.vector is None for x in self._local):
            return None
        return self._joined([x.vector for x in self._local if x.vector is not None])

    @property
    def gradient(self) -> Float[Array, " params"]:
        """∇f."""
        return self._pull([x.cotangents for x in self._local])

    def push(self, v: Float[Array, " params"]) -> Float[Array, " rows"]:
        """J·v."""
        _, tangents = jax.jvp(self._outputs, (self.params,), (from_vector(v, self.params),))
        return self._rows(tangents)

    def push_twice(
        self, v: Float[Array, " params"]
    ) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
        """J·v, and the second derivative of ρ along v.

        For a loss of outputs, what multiplies their derivatives in J is held fixed.
        """
        tangent = from_vector(v, self.params)

        def first(params: PyTree) -> list[Array]:
            return jax.jvp(self._outputs, (params,), (tangent,))[1]

        once, twice = jax.jvp(first, (self.params,), (tangent,))
        return self._rows(once), self._rows(twice)

    def pull(self, y: Float[Array, " rows"]) -> Float[Array, " params"]:
        """Jᵀ·y."""
        parts = []
        for b, x, part in zip(self.blocks, self._local, self._split(y), strict=True):
            part = _multiplied(x.factors, part)
            parts.append(part - jnp.mean(part, 0, keepdims=True) if b.centred else part)
        return self._pull(parts)

    def product(self, v: Float[Array, " params"]) -> Float[Array, " params"]:
        """Jᵀ·J·v, without J."""
        return self.pull(self.push(v))

    def jacobian(self, chunk: int | None = None) -> Float[Array, "rows params"]:
        """J.

        **Arguments:**

        - `chunk`: the number of examples that are differentiated at a time. Defaults to all.
        """
        parts = []
        for i in range(len(self.blocks)):
            starts, read = self._chunks(i, chunk)
            if len(starts) == 1:
                parts.append(read(starts[0])[0])
                continue
            stacked = jax.lax.map(lambda at, read=read: read(at)[0], jnp.asarray(starts))
            parts.append(stacked.reshape(-1, self.num_params)[: self.outputs[i].size])
        return jnp.concatenate(parts)

    def fold(
        self,
        body: Callable[[Any, Any, Any], Any],
        start: Any,
        vector: Float[Array, " rows"],
        chunk: int | None = None,
    ) -> Any:
        """`body(carry, rows, part)` over the rows of J and the entries of a vector, `chunk`
        examples at a time.

        Rows that fill up the last chunk of a block are zero, and so are the entries there.
        """
        carry = start
        for i, part in enumerate(self._split(vector)):
            starts, read = self._chunks(i, chunk)

            def one(carry: Any, at: Any, read: Any = read, part: Any = part) -> tuple[Any, None]:
                rows, take = read(at)
                return body(carry, rows, take(part).reshape(-1)), None

            if len(starts) == 1:
                carry, _ = one(carry, starts[0])
            else:
                carry, _ = jax.lax.scan(one, carry, jnp.asarray(starts))
        return carry

    def kernel(self, chunk: int | None = None) -> Float[Array, "rows rows"]:
        """J·Jᵀ, from the Jacobian, or with `chunk` from the Jacobians of pairs of chunks."""
        if chunk is None or all(b.size <= chunk for b in self.blocks):
            jacobian = self.jacobian()
            return jacobian @ jacobian.T
        number = self.num_rows
        out = jnp.zeros((number + self._padding(chunk), number), self.dtype)
        start = 0
        for i in range(len(self.blocks)):
            starts, read = self._chunks(i, chunk)
            width = self.outputs[i].shape[1]

            def columns(out: Any, at: Any, read: Any = read, start: int = start, w: int = width):
                rows, _ = read(at)
                found = self._against(rows, chunk)
                place = (start + at * w, jnp.zeros((), at.dtype))
                return jax.lax.dynamic_update_slice(out, found.T, place), None

            out, _ = jax.lax.scan(columns, out, jnp.asarray(starts))
            start += self.outputs[i].size
        return out[:number]

    def _against(self, rows: Array, chunk: int) -> Array:
        """J·rowsᵀ, some examples at a time."""
        parts = []
        for i in range(len(self.blocks)):
            starts, read = self._chunks(i, chunk)
            found = jax.lax.map(lambda at, read=read: read(at)[0] @ rows.T, jnp.asarray(starts))
            parts.append(found.reshape(-1, rows.shape[0])[: self.outputs[i].size])
        return jnp.concatenate(parts)

    def _padding(self, chunk: int) -> int:
        """The most rows by which the last chunk of a block reaches beyond the block."""
        widths = (
            (-b.size) % min(chunk, b.size) * z.shape[1]
            for b, z in zip(self.blocks, self.outputs, strict=True)
        )
        return max(widths)

    def updates(self, direction: Float[Array, " params"]) -> Updates:
        """A vector as a tree like the parameters, in the accumulation dtype."""
        return from_vector(direction, tree.widened(self.params))

    # --- the parts ----------------------------------------------------------------------------

    def _model(self, params: PyTree) -> PyTree:
        for outward in self._outward:
            params = outward(params)
        return params

    def _outputs(self, params: PyTree) -> list[Array]:
        """The outputs of every block, with an axis of examples."""
        model = self._model(params)
        found = []
        for block in self.blocks:
            if block.rows is None:
                z = block.outputs(model, None)[None]
            else:
                # The model may hold more than arrays, so it is no argument of the `vmap`.
                z = jax.vmap(functools.partial(block.outputs, model))(block.rows)
            found.append(_whole(tree.cast(z, self.dtype)))
        return found

    def _pull(self, cotangents: list[Array]) -> Array:
        assert self._pullback is not None
        (found,) = self._pullback([tree.cast(c, self.dtype) for c in cotangents])
        return _covector(found, self.dtype)

    def _rows(self, tangents: list[Array]) -> Array:
        """From derivatives of the outputs to those of ρ."""
        rows = [
            _multiplied(x.factors, z - jnp.mean(z, 0, keepdims=True) if b.centred else z)
            for b, x, z in zip(self.blocks, self._local, tangents, strict=True)
        ]
        return self._joined(rows)

    def _joined(self, parts: list[Array]) -> Array:
        return jnp.concatenate([tree.cast(x, self.dtype).reshape(-1) for x in parts])

    def _split(self, y: Array) -> list[Array]:
        """The entries of each block."""
        parts, start = [], 0
        for z in self.outputs:
            parts.append(y[start : start + z.size].reshape(z.shape))
            start += z.size
        return parts

    def _chunks(self, i: int, chunk: int | None) -> tuple[list[int], Callable[[Any], Any]]:
        """Where the chunks of a block start, and a function from there to the rows of J and to
        the way to read the same entries of an array."""
        block, local, outputs = self.blocks[i], self._local[i], self.outputs[i]
        size = block.size
        length = size if chunk is None or block.rows is None else min(chunk, size)
        mean = None
        if block.centred:
            ones = jnp.eye(outputs.shape[1], dtype=self.dtype) / size
            mean = jnp.stack([self._of_block(i, row) for row in ones])

        def read(start: Any) -> tuple[Array, Callable[[Array], Array]]:
            at = start + jnp.arange(length)
            inside = at < size
            # The last example fills up the last chunk: zeros might give NaN.
            at = jnp.minimum(at, size - 1)

            def take(part: Array) -> Array:
                if length == size:
                    return part
                return jnp.where(inside[:, None], part[at], 0)

            rows, factors = block.rows, local.factors
            if length != size:
                rows = jax.tree.map(lambda x: _whole(x)[at], rows)
                factors = factors[at]
            one = self._row_of(block)
            jacobian = one(None)[None] if rows is None else jax.vmap(one)(rows)
            jacobian = _whole(jacobian)
            if mean is not None:
                jacobian = jacobian - mean[None]
            if factors.ndim == 1:
                jacobian = jacobian * factors[:, None, None]
            else:
                jacobian = jnp.einsum("nij,njp->nip", factors, jacobian)
            if length != size:
                jacobian = jnp.where(inside[:, None, None], jacobian, 0)
            return jacobian.reshape(-1, self.num_params), take

        return list(range(0, size, length)), read

    def _of_block(self, i: int, weights: Array) -> Array:
        """The sum over the examples of a block of the derivative of their weighted outputs."""
        zeros = [jnp.zeros_like(z) for z in self.outputs]
        zeros[i] = jnp.broadcast_to(weights, self.outputs[i].shape)
        return self._pull(zeros)

    def _row_of(self, block: AbstractBlock) -> Callable[[Any], Array]:
        """From one example to the Jacobian of its outputs, by the shorter side."""

        def one(row: Any) -> Array:
            def of_params(params: PyTree) -> Array:
                return tree.cast(block.outputs(self._model(params), row), self.dtype)

            width = jax.eval_shape(of_params, self.params).shape[0]
            if width <= self.num_params:
                _, pullback = jax.vjp(of_params, self.params)
                unit = jnp.eye(width, dtype=self.dtype)
                return jax.vmap(lambda y: _covector(pullback(y)[0], self.dtype))(unit)

            def push(v: Array) -> Array:
                return jax.jvp(of_params, (self.params,), (from_vector(v, self.params),))[1]

            return jax.vmap(push, out_axes=1)(jnp.eye(self.num_params, dtype=self.dtype))

        return one


def to_vector(params: PyTree, dtype: np.dtype) -> Float[Array, " params"]:
    """A tree as one vector, with the real parts of a complex leaf before the imaginary ones."""
    return _flat(params, dtype, 1)


def from_vector(vector: Float[Array, " params"], like: PyTree) -> PyTree:
    """Undoes `to_vector`: a tree with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for x in leaves:
        part = vector[start : start + real_size(x)]
        start += real_size(x)
        if jnp.iscomplexobj(x):
            part = jax.lax.complex(part[: x.size], part[x.size :])
        found.append(tree.cast(part.reshape(x.shape), tree.canonical(x.dtype)))
    return structure.unflatten(found)


def as_real(outputs: Any) -> Float[Array, " outputs"]:
    """An array as a vector of real numbers: the real parts before the imaginary ones."""
    flat = jnp.asarray(outputs).reshape(-1)
    if jnp.iscomplexobj(flat):
        return jnp.concatenate([flat.real, flat.imag])
    return flat


def _covector(cotangent: PyTree, dtype: np.dtype) -> Array:
    """What a reverse pass returns for a tree: for z = x + iy it is ∂f/∂x − i·∂f/∂y."""
    return _flat(cotangent, dtype, -1)


def _flat(params: PyTree, dtype: np.dtype, sign: int) -> Array:
    parts = []
    for x in jax.tree.leaves(params):
        x = jnp.asarray(x)
        if jnp.iscomplexobj(x):
            parts += [x.real, sign * x.imag]
        else:
            parts.append(x)
    flat = [_whole(x.reshape(-1)).astype(dtype) for x in parts]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, dtype)


def _multiplied(factors: Array, x: Array) -> Array:
    if factors.ndim == 1:
        return factors[:, None] * x
    return jnp.einsum("nij,nj->ni", factors, x)


def real_size(x: Inexact[Any, "..."]) -> int:
    """The number of real numbers in an array."""
    return x.size * (2 if jnp.iscomplexobj(x) else 1)


def _whole(x: Array) -> Array:
    """The array, the same on every device where the mesh has explicit axes: the rows of several
    blocks, which are joined, have different sizes, so that none fits a sharding."""
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    if not explicit or all(entry is None for entry in sharding.spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
