"""A loss near some parameters: its rows, and the products with their Jacobian."""

import abc
import copy
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ... import tree
from ...tree.sharding import replicated
from ...tree.tracing import equations
from ...tree.types import Scalar, Updates
from .real_vectors import as_covector, from_vector, real_size


class Local(NamedTuple):
    """The loss of a block, and its derivatives with respect to the outputs."""

    value: Scalar
    cotangents: Float[Array, "examples outputs"]
    """The derivative of the value with respect to the outputs."""
    factors: (
        Float[Array, " examples"]
        | Float[Array, "examples outputs"]
        | Float[Array, "examples outputs outputs"]
    )
    """The factor of the Jacobian of each example's outputs: a number, a number for each output, or
    a symmetric matrix."""
    vector: Float[Array, "examples outputs"] | None
    """ρ, or `None` if the gradient is not known to be of the form Jᵀρ."""


class AbstractBlock(eqx.Module):
    """A part of a loss: a map from one example to outputs, and a loss of these outputs."""

    rows: PyTree
    """The data, with a leading axis of examples. `None` if the block is not a map over them."""
    shared: PyTree
    """The data that all examples have, with `None` in the places of the others."""

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


class Linearization:
    """The loss near some parameters. All its vectors and matrices are real, in at least float32."""

    def __init__(
        self,
        blocks: tuple[AbstractBlock, ...],
        outward: tuple[Callable[[Any], Any], ...],
        params: PyTree,
        chunk: int | None,
        linear: bool = True,
    ):
        self.params = params
        self.blocks = blocks
        self.chunk = chunk
        """The number of examples that are differentiated at a time, or `None` for all."""
        self._outward = outward
        leaves = [x for x in jax.tree.leaves(params) if tree.is_inexact(x)]
        self.dtype = tree.sum_dtype(leaves)
        """The dtype of all its arrays."""
        self.num_params = sum(real_size(x) for x in leaves)
        """P, the number of real parameters."""
        derivatives = None
        if linear and chunk is None:
            pairs = [self._differentiated(block, block.rows) for block in self.blocks]
            outputs, derivatives = zip(*pairs, strict=True)
        else:
            outputs = self._outputs(params)
        self.outputs: list[Array] = list(outputs)
        # The outputs are on every device, so the data beside them must be too.
        whole: tuple[AbstractBlock, ...] = jax.tree.map(replicated, self.blocks)
        self._local = [b.local(z) for b, z in zip(whole, outputs, strict=True)]
        self.num_rows = sum(z.size for z in outputs)
        """N, the number of rows."""
        self._jacobian: Array | None = None
        self._free: Array | None = None
        if derivatives is not None:
            parts = list(zip(self.blocks, self._local, derivatives, strict=True))
            sums = [jnp.einsum("ni,nip->p", x.cotangents, d) for _, x, d in parts]
            self._gradient = functools.reduce(operator.add, sums)
            rows = [_multiplied(x.factors, _centred(b, d)) for b, x, d in parts]
            self._jacobian = jnp.concatenate([x.reshape(-1, self.num_params) for x in rows])

    def along(self, free: Bool[Array, " params"]) -> "Linearization":
        """The same with the other parameters held fixed: their columns of J are 0."""
        other = copy.copy(self)
        other._free = free.astype(self.dtype)
        if self._jacobian is not None:
            other._jacobian = other._at_free(self._jacobian)
            other._gradient = other._at_free(self._gradient)
        return other

    def _at_free(self, v: Array) -> Array:
        """With zeros at fixed parameters, which are the last axis."""
        return v if self._free is None else v * jnp.broadcast_to(self._free, v.shape)

    def is_at(self, params: PyTree) -> bool:
        """Whether this is the linearization at the same arrays."""
        leaves, structure = jax.tree.flatten(params)
        own, own_structure = jax.tree.flatten(self.params)
        return structure == own_structure and all(map(operator.is_, leaves, own))

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
        if self._jacobian is not None:
            return self._gradient
        ways = [lambda: self._pull([x.cotangents for x in self._local])]
        vector = self.vector
        if vector is not None:
            ways.append(lambda: self._pulled_by_rows(vector))
        return first_possible(*ways)

    def push(self, v: Float[Array, " params"]) -> Float[Array, " rows"]:
        """J·v."""
        if self._jacobian is not None:
            return self._jacobian @ v

        def forward() -> Array:
            tangent = (from_vector(self._at_free(v), self.params),)
            return self._rows(jax.jvp(self._outputs, (self.params,), tangent)[1])

        return first_possible(forward, lambda: self._against(v[None])[:, 0])

    def bend(self, v: Float[Array, " params"]) -> Float[Array, " rows"]:
        """The second derivative of ρ along v.

        For a loss of outputs, the factors of their derivatives in J are held fixed. Without a
        forward mode it is a difference, which is 0 where it would be rounding.
        """
        tangent = from_vector(v, self.params)

        def forward() -> Array:
            def first(params: PyTree) -> list[Array]:
                return jax.jvp(self._outputs, (params,), (tangent,))[1]

            return self._rows(jax.jvp(first, (self.params,), (tangent,))[1])

        def difference() -> Array:
            h = 0.1
            there = tree.add(self.params, self.updates(h * v))
            moved = [new - old for new, old in zip(self._outputs(there), self.outputs, strict=True)]
            found = 2 / h * (self._rows(moved) / h - self.push(v))
            rounding = jnp.finfo(self.dtype).eps * jnp.linalg.norm(self._rows(self.outputs))
            return jnp.where(jnp.linalg.norm(found) > 8 / h**2 * rounding, found, 0)

        return first_possible(forward, difference)

    def pull(self, y: Float[Array, " rows"]) -> Float[Array, " params"]:
        """Jᵀ·y."""
        if self._jacobian is not None:
            return y @ self._jacobian

        def reverse() -> Array:
            parts = zip(self.blocks, self._local, self._split(y), strict=True)
            return self._pull([_centred(b, _multiplied(x.factors, part)) for b, x, part in parts])

        return first_possible(reverse, lambda: self._pulled_by_rows(y))

    def rounding(self, params: Float[Array, " params"]) -> Float[Array, " params"]:
        """The gradient by each parameter that rounding all of them makes: ε·‖Jⱼ‖·‖J·diag(w)‖.

        **Arguments:**

        - `params`: the parameters w as a vector.
        """
        norms = jnp.linalg.norm(self.jacobian(), axis=0)
        return jnp.finfo(self.dtype).eps * norms * jnp.linalg.norm(norms * params)

    def jacobian(self) -> Float[Array, "rows params"]:
        """J."""
        if self._jacobian is not None:
            return self._jacobian
        return self._by_chunks(lambda rows: rows)

    def fold(
        self,
        body: Callable[[Any, Any, Any], Any],
        start: PyTree,
        vector: Float[Array, " rows"],
    ) -> PyTree:
        """`body(carry, rows, part)` over the rows of J and the entries of a vector, `chunk`
        examples at a time.

        Rows that fill up the last chunk of a block are zero, and so are the entries there.
        """
        if self._jacobian is not None:
            return body(start, self._jacobian, vector)
        carry = start
        for i, part in enumerate(self._split(vector)):
            starts, read = self._chunks(i)

            def one(carry: PyTree, at: Any, read: Any = read, part: Any = part) -> tuple[Any, None]:
                rows, take = read(at)
                return body(carry, rows, take(part).reshape(-1)), None

            carry, _ = jax.lax.scan(one, carry, starts)
        return carry

    def kernel(self) -> Float[Array, "rows rows"]:
        """J·Jᵀ, from the Jacobian, or with `chunk` from the Jacobians of pairs of chunks."""
        if self._jacobian is not None:
            return tree.matmul(self._jacobian, self._jacobian.T)
        return self._by_chunks(lambda rows: self._against(rows).T)

    def _against(self, rows: Array) -> Array:
        """J·rowsᵀ."""
        return self._by_chunks(lambda others: tree.matmul(others, rows.T))

    def _by_chunks(self, function: Callable[[Array], Array]) -> Array:
        """The results of a function of rows of J, which is called with `chunk` examples at a time.

        It returns a row for each of them.
        """
        parts = []
        for i, outputs in enumerate(self.outputs):
            starts, read = self._chunks(i)
            stacked = jax.lax.map(lambda at, read=read: function(read(at)[0]), starts)
            parts.append(stacked.reshape(-1, stacked.shape[-1])[: outputs.size])
        return jnp.concatenate(parts)

    def _pulled_by_rows(self, y: Array) -> Array:
        zeros = jnp.zeros(self.num_params, self.dtype)
        return self.fold(lambda total, rows, part: total + part @ rows, zeros, y)

    def updates(self, direction: Float[Array, " params"]) -> Updates:
        """A vector as a tree like the parameters, in the accumulation dtype."""
        return from_vector(direction, tree.widened(self.params))

    # --- the parts ----------------------------------------------------------------------------

    def _model(self, params: PyTree) -> PyTree:
        return functools.reduce(lambda x, outward: outward(x), self._outward, params)

    def _outputs(self, params: PyTree) -> list[Array]:
        """The outputs of every block, with an axis of examples."""
        model = self._model(params)
        # The model may hold more than arrays, so it is no argument of the `vmap`.
        each = (_of_each(functools.partial(b.outputs, model), b.rows) for b in self.blocks)
        return [replicated(tree.cast(z, self.dtype)) for z in each]

    def _pull(self, cotangents: list[Array]) -> Array:
        _, pullback = jax.vjp(self._outputs, self.params)
        (found,) = pullback([tree.cast(c, self.dtype) for c in cotangents])
        return self._at_free(as_covector(found, self.dtype))

    def _rows(self, tangents: list[Array]) -> Array:
        """Turns derivatives of the outputs into derivatives of ρ."""
        parts = zip(self.blocks, self._local, tangents, strict=True)
        return self._joined([_multiplied(x.factors, _centred(b, z)) for b, x, z in parts])

    def _joined(self, parts: list[Array]) -> Array:
        return jnp.concatenate([tree.cast(x, self.dtype).reshape(-1) for x in parts])

    def _split(self, y: Array) -> list[Array]:
        """The entries of each block."""
        *ends, _ = itertools.accumulate(z.size for z in self.outputs)
        parts = zip(jnp.split(y, ends), self.outputs, strict=True)
        return [part.reshape(z.shape) for part, z in parts]

    def _chunks(self, i: int) -> tuple[Array, Callable[[Any], Any]]:
        """The starts of the chunks of a block, and a function from a start to the rows of J and to
        a reader of the same entries of an array."""
        block, local, outputs = self.blocks[i], self._local[i], self.outputs[i]
        size = block.size
        length = size if self.chunk is None else min(self.chunk, size)
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
                return jnp.where(inside[:, None], part[at], 0)

            rows = jax.tree.map(lambda x: replicated(x)[at], block.rows)
            jacobian = self._at_free(self._differentiated(block, rows)[1])
            if mean is not None:
                jacobian = jacobian - mean[None]
            jacobian = _multiplied(local.factors[at], jacobian)
            jacobian = jnp.where(inside[:, None, None], jacobian, 0)
            return jacobian.reshape(-1, self.num_params), take

        return jnp.arange(0, size, length), read

    def _of_block(self, i: int, weights: Array) -> Array:
        """The sum over the examples of a block of the derivative of their weighted outputs."""
        zeros = [jnp.zeros_like(z) for z in self.outputs]
        zeros[i] = jnp.broadcast_to(weights, self.outputs[i].shape)
        return self._pull(zeros)

    def _differentiated(self, block: AbstractBlock, rows: PyTree) -> tuple[Array, Array]:
        """The outputs for these examples, and their derivatives by all parameters."""
        found = _of_each(functools.partial(self._one_differentiated, block), rows)
        return jax.tree.map(replicated, found)

    def _one_differentiated(self, block: AbstractBlock, row: PyTree) -> tuple[Array, Array]:
        """The outputs for one example and their Jacobian, by the mode that takes fewer passes, or
        by the other one where there is no such mode."""

        def outputs(params: PyTree) -> Array:
            return tree.cast(block.outputs(self._model(params), row), self.dtype)

        def reverse() -> tuple[Array, Array]:
            z, pullback = jax.vjp(outputs, self.params)
            unit = jnp.eye(len(z), dtype=self.dtype)
            return z, jax.vmap(lambda y: as_covector(pullback(y)[0], self.dtype))(unit)

        def forward() -> tuple[Array, Array]:
            def push(v: Array) -> tuple[Array, Array]:
                return jax.jvp(outputs, (self.params,), (from_vector(v, self.params),))

            return jax.vmap(push, out_axes=(None, 1))(jnp.eye(self.num_params, dtype=self.dtype))

        width = jax.eval_shape(outputs, self.params).shape[0]
        if width <= self.num_params:
            return first_possible(reverse, forward)
        return first_possible(forward, reverse)


Result = TypeVar("Result")


def first_possible(*ways: Callable[[], Result]) -> Result:
    """The result of the first function that can be traced.

    Some residuals have only one mode of differentiation, which shows when it is tried: a
    `while_loop` has no reverse mode, and a `custom_vjp` no forward mode.
    """
    errors = []
    for way in ways:
        traced = jax.jit(way, inline=True)
        try:
            # The missing forward mode of a `custom_vjp` is an error only when it is compiled.
            known = equations(traced.trace().jaxpr.jaxpr)
            if all(x.primitive.name != "custom_lin" for x in known):
                return traced()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return ways[0]()


def _multiplied(factors: Array, x: Array) -> Array:
    """Factors times outputs, or times their derivatives, which have one axis more."""
    if factors.ndim < 3:
        return factors.reshape(*factors.shape, *(1,) * (x.ndim - factors.ndim)) * x
    return jnp.einsum("nij,nj...->ni...", factors, x, precision="highest")


def _of_each(function: Callable[[Any], PyTree], rows: PyTree) -> PyTree:
    """The results of a function of each example, or of `None` for a block that has none."""
    if rows is None:
        return jax.tree.map(lambda x: x[None], function(None))
    return jax.vmap(function)(rows)


def _centred(block: AbstractBlock, x: Array) -> Array:
    return x - jnp.mean(x, 0, keepdims=True) if block.centred else x
