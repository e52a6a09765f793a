"""Parameters in another form: joined in buffers, or complex ones as pairs of real ones."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from ... import fields, tree
from ..._core.engine.manual_axes import refuse_shards
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.chain import Chain
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part, instances, transforms
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import ADD, RETURN, Writer
from ...tree.paths import HalfKey, leaf_paths, snake_case
from ...tree.tracing import as_arguments
from ...tree.types import Gradients, Params, Tracer, Updates

_MAX_SIZE = 8192
"""The size at which concatenation starts to pay on a CPU. It is larger on a GPU."""
_MOST_LEAVES = 256
"""The most leaves in one buffer. With all leaves in one, the time to compile grew with the square
of their number: on a CPU from 9 s for 2000 leaves to 31 s for 4000."""


class Joined(eqx.Module):
    """The parameters or updates that the inner transform of `Flatten` sees."""

    together: dict[str, Array]
    """The small leaves, concatenated into buffers for each dtype of the parameters."""
    apart: PyTree
    """The tree with only the large leaves."""


class FlattenState(eqx.Module):
    """The state of `Flatten`."""

    inner: PyTree
    """The inner transform's state: a `Joined` in place of every parameter-shaped tree."""
    buffers: tuple[str, ...] = eqx.field(static=True)
    """The buffer of each small parameter, named by its dtype. Updates may have another one."""
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    """The shape of each small parameter."""


class Flatten(AbstractWrapper[FlattenState]):
    """Applies the inner transform to many small leaves at once, in buffers of one dtype each.

    Made by `tx.flatten`, which describes the arguments.

    The result does not change, but a few large computations replace one computation per leaf. This
    is faster for models with very many small leaves, where the overhead of each computation
    dominates, even when the step is compiled. Large leaves are not concatenated, because the copies
    would cost more than they save.

    A buffer has no leaves for masks or for norms of single leaves. So the inner transform may only
    act on each element separately, as Adam does, or through sums over all elements, as
    `sl.ClipByGlobalNorm` does. The sums may differ by rounding, because their order changes.
    Flatten all links that allow it: `(sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3)).flatten()`.

    A buffer is replicated over the devices, even where its leaves are sharded.

    Differs from Optax, which concatenates leaves of all sizes.
    """

    over: ClassVar[str] = "tree"

    max_size: int = fields.count_field(_MAX_SIZE)

    def __check_init__(self):
        for part in transforms(self.inner):
            module = part.module
            # A selector would not find its leaves in a buffer.
            sums = module.over == "sums" and not module.selectors()
            if not (module.elementwise or sums):
                raise ValueError(
                    f"{part.name or type(module).__name__} cannot be used under `.flatten()`, "
                    "which takes only links that act on single elements, or through sums over all "
                    "of them. Flatten only those, for example `sl.ClipByBlockRms(1.0) | "
                    "sl.adam(1e-3).flatten()`, and apply wrappers afterwards, as in "
                    "`tx.flatten().if_finite()`."
                )

    def init(self, params: Params) -> FlattenState:
        tree.check_inexact(params)
        small = [x for x in jax.tree.leaves(params) if self._joins(x)]
        buffers = _names([str(tree.canonical(x.dtype)) for x in small])
        shapes = tuple(np.shape(x) for x in small)
        return FlattenState(self.inner.init(self._join(params, buffers)), buffers, shapes)

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, FlattenState]:
        state, context, params = here.state, here.context, here.params
        if params is not None:
            tree.check_same_structure((updates, params))
        self._check_shapes(updates, state)
        buffers, inner = state.buffers, self.inner_part(here)
        links = inner.children() if isinstance(self.inner, Chain) else (inner,)
        stateful = [i for i, link in enumerate(links) if jax.tree.leaves(link.state)]
        until = stateful[-1] + 1 if stateful else 0
        joined = self._join(updates, buffers) if until else None
        full = write.full(params)
        seen = full if full is None or not until else self._join(full, buffers)
        # Without parameters, no link evaluates a function of them.
        inside = context.in_form(
            lambda whole: self._join(whole, buffers),
            lambda joined: self._split(joined, full, buffers),
        )
        states = []
        for link in links[:until]:
            joined, new = link._replace(params=seen, context=inside).run(RETURN, joined)
            states.append(new)
        if joined is not None:
            updates = self._split(joined, updates, buffers)
        # Stateless links run leaf by leaf, fused with the addition to the parameters. So the
        # parameters need no buffer, although weight decay reads them.
        for link in links[until:]:
            link = link._replace(params=full, context=context)
            updates, new = link.run(RETURN, updates)
            states.append(new)
        inner = tuple(states) if isinstance(self.inner, Chain) else states[0]
        return write(params, updates), FlattenState(inner, buffers, state.shapes)

    def _check_shapes(self, updates: Updates, state: FlattenState) -> None:
        """Raises an error for parameters whose shapes differ from those at `init`."""
        named = zip(leaf_paths(updates), jax.tree.leaves(updates), strict=True)
        small = [(path, np.shape(x)) for path, x in named if self._joins(x)]
        if tuple(shape for _, shape in small) != state.shapes:
            refuse_shards("Flatten", updates)
        if len(small) != len(state.shapes):
            raise ValueError(
                f"The state of `.flatten()` was created for {len(state.shapes)} small parameters, "
                f"and gets {len(small)}. Create a new optimizer with `sl.Optimizer(tx, model)`, or "
                "transfer the state with `opt.rebind(model)`."
            )
        for (path, shape), before in zip(small, state.shapes, strict=True):
            if shape != before:
                raise ValueError(
                    f"The parameter at '{path}' has shape {shape}, but the state of `.flatten()` "
                    f"was created for shape {before}. Create a new optimizer with "
                    "`sl.Optimizer(tx, model)`, or transfer the state with `opt.rebind(model)`."
                )

    def shares(self, state: FlattenState, params: Params) -> dict[str, dict[str, float]]:
        """The small parameters in each buffer, with the fraction of it that each occupies."""
        named = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        sizes: dict[str, dict[str, int]] = {}
        small = ((path, np.size(x)) for path, x in named if self._joins(x))
        for (path, size), name in zip(small, state.buffers, strict=True):
            sizes.setdefault(name, {})[path] = size
        return {
            f"together.{name}": {path: n / max(sum(part.values()), 1) for path, n in part.items()}
            for name, part in sizes.items()
        }

    def _joins(self, leaf: PyTree) -> bool:
        return np.size(leaf) <= self.max_size

    def _join(self, whole: PyTree, buffers: tuple[str, ...]) -> Joined:
        """A tree like the parameters with the small leaves in buffers."""
        leaves = jax.tree.leaves(whole)
        groups: dict[str, list[Any]] = {name: [] for name in buffers}
        for name, x in zip(buffers, filter(self._joins, leaves), strict=True):
            groups[name].append(x)
        apart = tree.cut(whole, tuple(not self._joins(x) for x in leaves))
        return Joined({name: _concatenate(group) for name, group in groups.items()}, apart)

    def _split(self, joined: Joined, like: PyTree, buffers: tuple[str, ...]) -> PyTree:
        """Undoes `_join`: a tree of the structure and shapes of `like`."""
        leaves, structure = jax.tree.flatten(like)
        small = [x for x in leaves if self._joins(x)]
        ends = dict.fromkeys(joined.together, 0)
        starts: list[int] = []
        for name, x in zip(buffers, small, strict=True):
            starts.append(ends[name])
            ends[name] += np.size(x)
        # Leaves of different buffers share them. Unsigned, since JAX would count negative ones from
        # the end.
        unique = sorted({*starts})
        arguments = as_arguments(
            list(map(np.uint32, unique)), next(iter(joined.together.values()), None)
        )
        start_of = dict(zip(unique, arguments, strict=True))
        of_small = zip(buffers, starts, strict=True)
        apart = iter(jax.tree.leaves(joined.apart))
        pieces = []
        for x in leaves:
            if not self._joins(x):
                pieces.append(next(apart))
                continue
            name, start = next(of_small)
            piece = jax.lax.dynamic_slice(joined.together[name], (start_of[start],), (np.size(x),))
            piece = jnp.reshape(piece, np.shape(x))
            pieces.append(_with_spec(piece, x, jax.typeof(x).sharding.spec))
        return structure.unflatten(pieces)


def _names(dtypes: list[str]) -> tuple[str, ...]:
    """The buffers of leaves with these dtypes: float32, and float32_2 where the first is full."""
    counts = dict.fromkeys(dtypes, 0)
    names = []
    for dtype in dtypes:
        number = counts[dtype] // _MOST_LEAVES + 1
        names.append(dtype if number == 1 else f"{dtype}_{number}")
        counts[dtype] += 1
    return tuple(names)


def _concatenate(group: list[Any]) -> Array:
    dtypes = {tree.canonical(x.dtype) for x in group}
    # Updates in one buffer may differ in dtype, so they are promoted to a common one.
    if len(dtypes) == 1:
        (dtype,) = dtypes
    else:
        dtype = tree.accumulation_dtype(*dtypes, *(x.dtype for x in group))
    whole = [_with_spec(x, x, PartitionSpec(*(None,) * np.ndim(x))) for x in group]
    buffer = jnp.concatenate([jnp.ravel(jnp.asarray(x, dtype)) for x in whole])
    sharding = None if isinstance(buffer, Tracer) else buffer.sharding
    if not isinstance(sharding, NamedSharding):
        return buffer
    # The compiler would choose, depending on the leaves. `sl.plan` must know.
    return jax.device_put(buffer, sharding.update(spec=tree.canonical_spec(sharding.mesh, (), 1)))


def _with_spec(x: Array, like: Array, spec: PartitionSpec) -> Array:
    """An array with this sharding along the explicit axes of the mesh of another, if there are any.

    They are part of its type, so that only arrays that are sharded alike can be joined and added.
    """
    sharding = jax.typeof(like).sharding
    if jax.typeof(x).sharding.spec == spec:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=spec))


class RealAndImaginary(NamedTuple):
    """A complex array, as the inner transform of `SplitComplex` sees it."""

    real: Float[Array, "*shape"]
    imag: Float[Array, "*shape"]


# With keys of its own type, because selectors name parameters, not their parts.
jax.tree_util.register_pytree_with_keys(
    RealAndImaginary,
    lambda pair: (((HalfKey("real"), pair.real), (HalfKey("imag"), pair.imag)), None),
    lambda _, halves: RealAndImaginary(*halves),
)


class SplitComplex(AbstractWrapper[Any]):
    """Applies the inner transform to the real and imaginary parts of complex leaves.

    Made by `tx.split_complex`, which describes the arguments.

    The two parts are separate real leaves, with separate second moments, norms and signs. Real
    leaves are unchanged.

    A selector inside names the parameter and selects both parts: its path is `"w"`, not
    `"w.real"`. In the state, the parts have separate paths, such as `scale_by_adam.mu.w.real`. The
    `grad`, `per_param` and `value_fn` of the context are split too.

    A transform that writes parameters itself must wrap this one, as in
    `tx.split_complex().lookahead(5, 0.5)`.
    """

    passes_gradients: ClassVar[bool] = True
    over: ClassVar[str] = "tree"

    def __check_init__(self):
        for part in instances(self.inner, AbstractParameterWriter):
            method = snake_case(type(part.module).__name__)
            raise ValueError(
                f"{type(part.module).__name__} writes parameters itself, so it cannot be used "
                "inside `.split_complex()`. Change the order: "
                f"`tx.split_complex().{method}(...)` instead of "
                f"`tx.{method}(...).split_complex()`."
            )

    def inner_part(self, here: Part) -> Part:
        params = None if here.params is None else _split(here.params)
        return super().inner_part(here)._replace(params=params)

    def inner_context(self, here: Part) -> Context:
        return here.context.in_form(_split, joined)

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        if write is ADD:
            result, state = self.inner_part(here).run(write, _split(updates))
            return joined(result), state
        # Other writes need whole parameters.
        part = self.inner_part(here._replace(params=write.full(here.params)))
        halves, state = part.run(RETURN, _split(updates))
        return write(here.params, joined(halves)), state

    def signs(self, params: Params) -> tuple[int | None, ...]:
        signs = iter(self.inner.signs(_split(params)))
        result: list[int | None] = []
        for leaf in jax.tree.leaves(params):
            halves = {next(signs) for _ in jax.tree.leaves(_split(leaf))}
            result.append(halves.pop() if len(halves) == 1 else None)
        return tuple(result)


def _split(tree: PyTree) -> PyTree:
    def halves(x: PyTree) -> PyTree:
        return RealAndImaginary(x.real, x.imag) if jnp.iscomplexobj(x) else x

    return jax.tree.map(halves, tree)


def joined(tree: PyTree) -> PyTree:
    """A tree with the complex arrays in place of their parts."""

    def is_pair(x: object) -> bool:
        return isinstance(x, RealAndImaginary)

    return jax.tree.map(lambda x: jax.lax.complex(*x) if is_pair(x) else x, tree, is_leaf=is_pair)
