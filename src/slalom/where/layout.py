"""Declares which axes of an array are outputs and which are inputs.

A layout is a string with a letter for each axis, in order:

- `o`: outputs;
- `i`: inputs;
- `k`: the kernel of a convolution, which belongs to the inputs;
- `v`: the vocabulary of an embedding, whose rows are looked up instead of multiplied;
- `s`: a stack of separate matrices.

Several axes may have the same letter. Axes in front of the letters are stacks too, such as those
that `eqx.filter_vmap` makes. `(3o)` is an axis of outputs in 3 equal blocks, each a matrix of its
own, such as a projection to queries, keys and values at once, and `(4:1:1o)` one in blocks of these
proportions, where keys and values have fewer heads. The groups of a convolution are such blocks.
`heads` separates the heads in the projections of an `eqx.nn.MultiheadAttention`.

The layout of an array is, in this order: what the user passes to the rule (`layout={where: "io"}`),
what a module around it states (`__layout__ = {"weight": "io"}`), that of a known layer, and, as
Optax assumes, inputs before outputs. Rules read it through `rules/_layout.py`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from ..tree.paths import dotted, glob_pattern
from ..tree.types import Params
from .masks import resolve
from .resolve import Cases, Leaf, Where, as_where
from .selectors import everything

LayoutLike: TypeAlias = str | Mapping[Any, str] | Where | None
"""A layout for all arrays, or a mapping from selectors to layouts."""

HEADS = "heads"
_AXIS = re.compile(r"([oikvs])|\(([1-9]\d*(?::[1-9]\d*)*)([oi])\)")
_INPUTS = "ik"


# --- a matrix -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A view of an array as a batch of matrices, outputs × inputs, and its inverse."""

    shape: tuple[int, ...]
    """The shape of the array."""
    split: tuple[int, ...]
    """Its shape with an axis for each block."""
    groups: tuple[tuple[int, ...], ...]
    """The axes of `split` that are stacks, outputs and inputs."""
    batch: int
    """The number of matrices."""
    rows: int
    """The number of outputs."""
    columns: int
    """The number of inputs."""

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of `split`: stacks, then outputs, then inputs."""
        return tuple(a for group in self.groups for a in group)

    def read(self, x: Inexact[Array, "..."]) -> Inexact[Array, "batch rows columns"]:
        """The array as a batch of matrices."""
        ordered = jnp.transpose(jnp.reshape(x, self.split), self.order)
        return jnp.reshape(ordered, (self.batch, self.rows, self.columns))

    def write(self, matrices: Inexact[Array, "batch rows columns"]) -> Inexact[Array, "..."]:
        """Undoes `read`."""
        ordered = jnp.reshape(matrices, tuple(self.split[a] for a in self.order))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return jnp.reshape(jnp.transpose(ordered, back), self.shape)

    def __str__(self) -> str:
        one = f"{self.rows} × {self.columns}"
        return one if self.batch == 1 else f"{self.batch} of {one}"


# --- a layout -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of each axis of one array."""

    shape: tuple[int, ...]
    letters: tuple[tuple[str, int], ...] | None
    """The letter and the number of equal blocks of each axis; `None` if unknown."""
    unequal: tuple[int, tuple[int, ...]] | None = None
    """An axis in blocks of other sizes, and these sizes."""
    guessed: bool = False
    """Whether the layout is Optax's assumption, because nothing states it."""
    module: str | None = None
    """The class that owns the array, if it is a module of the user's and the layout is guessed."""
    tied: bool = False
    """Whether the array is also the weight of an embedding."""

    def axes(self, letters: str) -> tuple[int, ...]:
        """The axes with these letters."""
        return tuple(a for a, (letter, _) in enumerate(self.letters or ()) if letter in letters)

    @property
    def split(self) -> tuple[tuple[str, int], ...]:
        """The letter and the size of each axis, where blocks have an axis of their own, a stack.

        If the layout is unknown, all numbers belong to one layer.
        """
        if self.letters is None:
            return tuple(("o", size) for size in self.shape)
        split: list[tuple[str, int]] = []
        for size, (letter, blocks) in zip(self.shape, self.letters, strict=True):
            split += [("s", blocks)] * (blocks > 1) + [(letter, size // blocks)]
        return tuple(split)

    @property
    def blocks(self) -> tuple["Layout", ...]:
        """The layouts of the unequal blocks, or only this one."""
        if self.unequal is None:
            return (self,)
        axis, sizes = self.unequal
        shapes = [(*self.shape[:axis], n, *self.shape[axis + 1 :]) for n in sizes]
        return tuple(dataclasses.replace(self, shape=shape, unequal=None) for shape in shapes)

    def divide(self, x: Inexact[Array, "..."]) -> tuple[Inexact[Array, "..."], ...]:
        """The array in its unequal blocks."""
        if self.unequal is None:
            return (x,)
        axis, sizes = self.unequal
        return tuple(jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis))

    def join(self, blocks: Sequence[Inexact[Array, "..."]]) -> Inexact[Array, "..."]:
        """Undoes `divide`."""
        return blocks[0] if self.unequal is None else jnp.concatenate(blocks, self.unequal[0])

    @property
    def unit(self) -> tuple[int, ...] | None:
        """The axes along which the numbers belong to one output; `None` if unknown.

        Blocks make no difference.
        """
        if self.letters is None:
            return None
        inputs = self.axes("ikv")
        return inputs if inputs and self.axes("o") else self.axes("oikv")

    @property
    def pair(self) -> tuple[int, int] | None:
        """The longest axis of outputs and the longest of inputs without the kernel."""
        out, into = self.axes("o"), self.axes("iv")
        if not out or not into:
            return None
        return max(out, key=self.shape.__getitem__), max(into, key=self.shape.__getitem__)

    @property
    def not_a_matrix(self) -> str | None:
        """Why this array is not a matrix of a layer, such as `"a vector"`; `None` if it is one."""
        # Optax guesses units with more axes, but no matrices.
        if self.letters is None or (self.guessed and len(self.shape) > 2 and self.axes("i")):
            return f"an array with {len(self.shape)} axes of unknown layout"
        if self.axes("v"):
            return "an embedding"
        if self.tied:
            return "tied to an embedding"
        if self.axes("o") and self.axes(_INPUTS):
            # The taps of a single input form no matrix.
            single = self.is_grouped and all(self.shape[a] == 1 for a in self.axes("i"))
            return "a depthwise kernel" if single else None
        used = self.axes("oik")
        if sum(self.shape[a] != 1 for a in used) < 2:
            return "a vector" if used else "a scalar"
        return "an array without inputs" if self.axes("o") else "an array without outputs"

    @property
    def is_grouped(self) -> bool:
        """Whether its blocks are groups of a convolution, which have separate inputs."""
        blocks = max((n for letter, n in self.letters or () if letter == "o"), default=1)
        return blocks > 1 and bool(self.axes("k"))

    @property
    def matrix(self) -> Matrix | None:
        """Its view as matrices; `None` if it is no matrix of a layer."""
        if self.not_a_matrix is not None:
            return None
        split = tuple(size for _, size in self.split)
        groups = tuple(
            tuple(a for a, (letter, _) in enumerate(self.split) if letter in which)
            for which in ("s", "o", _INPUTS)
        )
        batch, rows, columns = (math.prod(split[a] for a in group) for group in groups)
        return Matrix(self.shape, split, groups, batch, rows, columns)


def parsed(letters: str | None) -> tuple[tuple[str, int], ...] | None:
    """The letter and the number of equal blocks of each axis; `None` for what is no layout."""
    if letters is None:
        return None
    matches = [(m[1] or m[3], _shares(m)) for m in _AXIS.finditer(letters)]
    several = sum(len(shares) > 1 for _, shares in matches) > 1
    axes = tuple((letter, 1 if shares[1:] else shares[0]) for letter, shares in matches)
    return None if several or _AXIS.sub("", letters) else axes


def _shares(axis: re.Match[str]) -> tuple[int, ...]:
    """The proportions of the blocks of an axis. One number means equal blocks."""
    return tuple(map(int, (axis[2] or "1").split(":")))


def as_layout(layout: Any) -> Any:
    """The `layout` of a rule as a selector that labels arrays with their layout."""
    if isinstance(layout, str):
        return Cases(((everything(), layout),))
    if isinstance(layout, Mapping):
        return Cases(tuple((as_where(where), letters) for where, letters in layout.items()))
    return layout


def check_layout(name: str, layout: Any) -> None:
    """Raises an error for anything but a layout or a mapping from selectors to layouts."""
    if not isinstance(layout, Cases):
        raise TypeError(
            f"{name} takes a layout such as 'io', or a mapping from selectors to layouts, such as "
            f"{{sl.where.path('w'): 'io'}}, got {layout!r}."
        )
    for where, letters in layout.cases:
        if any(primitive.sees_dtypes for primitive in where.primitives()):
            raise ValueError(
                f"{name} selects by dtype ({where!r}), which does not tell outputs from inputs, "
                "and which updates need not share. Select by path, type or number of axes."
            )
        if not isinstance(letters, str) or (letters != HEADS and parsed(letters) is None):
            raise ValueError(f"{name} has {letters!r}, which is not a layout. {_LETTERS}")


_LETTERS = (
    "A layout has a letter for each axis: o for outputs, i for inputs, k for a kernel, v for a "
    "vocabulary, s for a stack, (3o) for outputs in 3 blocks, (4:1:1o) for blocks of these "
    "proportions; or it is 'heads', for the projections of an eqx.nn.MultiheadAttention."
)


# --- the layout of a leaf -------------------------------------------------------------------


def layouts(params: Params, layout: Where | None = None) -> tuple[Layout, ...]:
    """The layout of each leaf, in order. Memoized.

    **Arguments:**

    - `params`: the parameters, or updates.
    - `layout`: the argument of the rule, as a selector; `None` reads the layers.
    """
    return resolve(layout_of, layout, params)


def layout_of(layout: Where | None, leaves: list[Leaf]) -> list[Layout]:
    """The layout of each of these leaves."""
    stated = [None] * len(leaves) if layout is None else layout.evaluate(leaves)
    return [_layout(leaf, letters) for leaf, letters in zip(leaves, stated, strict=True)]


def _layout(leaf: Leaf, stated: str | None) -> Layout:
    shape = tuple(leaf.struct.shape)
    nodes = leaf.ancestors()
    tied = stated is None and _is_tied(shape, nodes)
    if stated is not None:
        return _stated(leaf, nodes, stated, "is given the layout")
    for depth, node in enumerate(nodes):
        declared = _of_class(node, dotted(leaf.key_path[depth:]))
        if declared is not None:
            how = f"has the layout in {type(node).__name__}.__layout__"
            return dataclasses.replace(_stated(leaf, nodes, declared, how), tied=tied)
    axes = parsed(_of_layer(nodes[-1], leaf.path.rpartition(".")[2]))
    if axes is not None and len(shape) >= len(axes):
        return Layout(shape, _with_stacks(shape, axes), tied=tied)
    many = sum(n != 1 for n in shape) > 1
    module = type(nodes[-1]).__name__ if isinstance(nodes[-1], eqx.Module) and many else None
    return Layout(shape, _as_optax(shape), guessed=True, module=module, tied=tied)


def _stated(leaf: Leaf, nodes: list[Any], letters: str, how: str) -> Layout:
    """The layout that is stated in letters."""
    shape = tuple(leaf.struct.shape)
    written = _of_heads(leaf, nodes) if letters == HEADS else letters
    axes = parsed(written)
    if axes is None:
        raise ValueError(f"'{leaf.path}' {how} {letters!r}, which is not one. {_LETTERS}")
    if len(axes) > len(shape):
        raise ValueError(
            f"'{leaf.path}' {how} {letters!r}, with {len(axes)} axes, but its shape is {shape}."
        )
    unequal = None
    for axis, match in enumerate(_AXIS.finditer(written), len(shape) - len(axes)):
        size, shares = shape[axis], _shares(match)
        if size % sum(shares):
            raise ValueError(
                f"'{leaf.path}' {how} {letters!r}, but its shape is {shape}, and {size} is not a "
                f"multiple of the {sum(shares)} blocks of '{match[0]}'."
            )
        if len(shares) > 1:
            unequal = axis, tuple(share * (size // sum(shares)) for share in shares)
    return Layout(shape, _with_stacks(shape, axes), unequal)


def _with_stacks(
    shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    return (("s", 1),) * (len(shape) - len(axes)) + axes


def _of_class(node: Any, path: str) -> str | None:
    """The layout that a module states for one of its arrays."""
    stated = getattr(node, "__layout__", None)
    globs = stated.items() if isinstance(stated, Mapping) else ()
    return next((letters for glob, letters in globs if glob_pattern(glob).fullmatch(path)), None)


def _of_heads(leaf: Leaf, nodes: list[Any]) -> str:
    """The letters of an array of an attention layer, with a block for each head."""
    for depth, node in enumerate(nodes):
        if isinstance(node, eqx.nn.MultiheadAttention):
            projection, _, array = dotted(leaf.key_path[depth:]).partition(".")
            if projection == "output_proj":
                return f"o({node.num_heads}i)" if array == "weight" else "o"
            return f"({node.num_heads}o)" + "i" * (array == "weight")
    raise ValueError(
        f"'{leaf.path}' has the layout {HEADS!r}, but it does not belong to an "
        "eqx.nn.MultiheadAttention. Write the number of heads, such as '(8o)i'."
    )


def _is_tied(shape: tuple[int, ...], nodes: list[Any]) -> bool:
    """Whether `eqx.nn.Shared` uses this array as the weight of an embedding too.

    It leaves a hole in the embedding, and the array stays in another layer.
    """
    for node in nodes:
        if isinstance(node, eqx.nn.Shared):
            inside = jax.tree.leaves(node.pytree, is_leaf=_is_embedding)
            for layer in filter(_is_embedding, inside):
                size = (layer.num_embeddings, layer.embedding_size)
                if getattr(layer.weight, "shape", None) is None and shape in (size, size[::-1]):
                    return True
    return False


def _is_embedding(node: Any) -> bool:
    return isinstance(node, eqx.nn.Embedding)


def _as_optax(shape: tuple[int, ...]) -> tuple[tuple[str, int], ...] | None:
    """The letters of an array stored as in × out, by rank, as in Optax."""
    if sum(n != 1 for n in shape) <= 1:
        return parsed("o" * len(shape))
    return parsed({2: "io", 3: "ioo", 4: "kkio", 5: "kkkio"}.get(len(shape)))


# --- known layers ---------------------------------------------------------------------------


def _convolution(layer: Any) -> dict[str, str]:
    kernel = "k" * layer.num_spatial_dims
    # Each group of outputs has inputs of its own, whether the convolution is transposed or not.
    outputs = "o" if layer.groups == 1 else f"({layer.groups}o)"
    return {"weight": f"{outputs}i{kernel}", "bias": "o" * (1 + layer.num_spatial_dims)}


def _elementwise(shape: tuple[int, ...]) -> dict[str, str]:
    return {"weight": "o" * len(shape), "bias": "o" * len(shape)}


_RNN = {"weight_ih": "oi", "weight_hh": "oi", "bias": "o", "bias_n": "o"}

_LAYERS: dict[type | tuple[type, ...], Callable[[Any], dict[str, str]]] = {
    # The projections of an eqx.nn.MultiheadAttention are linear layers too.
    eqx.nn.Linear: lambda layer: {"weight": "oi", "bias": "o"},
    (eqx.nn.Conv, eqx.nn.ConvTranspose): _convolution,
    eqx.nn.Embedding: lambda layer: {"weight": "vo"},
    (eqx.nn.GRUCell, eqx.nn.LSTMCell): lambda layer: _RNN,
    (eqx.nn.LayerNorm, eqx.nn.RMSNorm): lambda layer: _elementwise(layer.shape),
    eqx.nn.GroupNorm: lambda layer: _elementwise((layer.channels,)),
    eqx.nn.BatchNorm: lambda layer: _elementwise((layer.input_size,)),
}


def _of_layer(owner: Any, name: str) -> str | None:
    """The letters of an array of one of Equinox's layers."""
    letters = (of(owner).get(name) for cls, of in _LAYERS.items() if isinstance(owner, cls))
    return next(letters, None)
