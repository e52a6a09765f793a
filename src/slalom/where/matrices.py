"""The selector of matrices, which reads layouts."""

import dataclasses
from typing import Any

from .layout import LayoutLike, as_layout, check_layout, layout_of
from .resolve import Leaf, Where


@dataclasses.dataclass(frozen=True)
class _Matrices(Where):
    unmatched_among = (
        "selects nothing: none of these parameters is a matrix. Matrices are the weights of "
        "`Linear` and `Conv` layers and other arrays with two axes; a layout makes matrices of "
        'others, such as `sl.where.matrix({sl.where.path("experts"): "soi"})`.'
    )

    layout: Where | None

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        return [layout.matrix is not None for layout in layout_of(self.layout, leaves)]

    def primitives(self) -> tuple[Where, ...]:
        return (self,) if self.layout is None else (self, *self.layout.primitives())

    def __repr__(self) -> str:
        return f"sl.where.matrix({'' if self.layout is None else repr(self.layout)})"


def matrix(layout: LayoutLike = None) -> Where:
    """Selects the matrices of layers: arrays with outputs and inputs.

    These are the weights of Equinox's `Linear` (including those in `MultiheadAttention`), `Conv`,
    `ConvTranspose`, `GRUCell` and `LSTMCell`, even where `eqx.filter_vmap` stacks these layers, and
    other arrays with two axes. Biases, scales, embeddings, and layers that `eqx.nn.Shared` ties to
    an embedding are not matrices.

    A layout tells outputs from inputs. It is a string with a letter for each axis: `o` for outputs,
    `i` for inputs, `k` for the kernel of a convolution, which belongs to the inputs, `v` for the
    vocabulary of an embedding, and `s` for a stack of separate matrices. Axes in front of the
    letters are stacks too. `(3o)` is an axis of outputs in 3 equal blocks, each a matrix of its
    own, and `(4:1:1o)` one in blocks of these proportions, which `sl.Orthogonalize` takes. `heads`
    separates the heads in the projections of a `MultiheadAttention`.

    Equinox's layers have the layout `oi`, or `oikk` with a kernel. The groups of a convolution are
    separate matrices, and a kernel with one input per group, a depthwise one, is none. Other arrays
    are read as Optax reads them, as `io`. A module of your own states its layout in the class:

    ```python
    >>> class Mixer(eqx.Module):
    ...     __layout__ = {"table": "vo", "qkv.weight": "(3o)i"}
    ...     table: jax.Array
    ...     qkv: eqx.nn.Linear

    ```

    The keys are globs over the paths inside the module. An outer module overrides an inner one.

    **Arguments:**

    - `layout`: the layout of arrays that would otherwise be read wrongly: a mapping from selectors
        to layouts, or one layout for all arrays. All rules for matrices have this argument.

    **Returns:** a selector.

    ```python
    >>> where = sl.where.matrix({sl.where.path("experts"): "soi"})

    ```
    """
    cases = as_layout(layout)
    if cases is not None:
        check_layout("sl.where.matrix", cases)
    return _Matrices(cases)
