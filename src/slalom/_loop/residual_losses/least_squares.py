"""Sums of mean squared residuals."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ... import tree
from ..._core.protocol.linearization import AbstractBlock, Local
from ..._core.protocol.real_vectors import as_real
from ..._core.protocol.residuals import Residuals
from ..._core.text.messages import check_bool
from ...tree.dtypes import nearest_float
from ...tree.paths import candidates
from ...tree.types import Tracer
from ..programs.arguments import as_tree
from .output_losses import (
    WHOLE,
    AbstractCurvatureLoss,
    as_arguments,
    call_of_example,
    divided,
    with_examples,
)

ONLY = "residual"
"""The name of the only block of a loss without names."""


class LeastSquares(AbstractCurvatureLoss):
    """A loss Σ wᵢ·mean|rᵢ|² of residuals, which are functions of one example.

    It is a loss for every rule. Rules such as `sl.gauss_newton` and `sl.levenberg_marquardt`
    also use the Jacobian of the residuals, which is taken example by example.

    ```python
    >>> def residual(model, x, y):
    ...     return model(x) - y
    >>> loss_fn = sl.LeastSquares(residual)
    >>> step = sl.train_step(loss_fn)
    >>> model = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.levenberg_marquardt(), model)
    >>> x = jnp.linspace(-1, 1, 20)[:, None]
    >>> for _ in range(20):
    ...     model, opt, loss = step(model, opt, x, x**2)
    >>> bool(loss < 1e-5)
    True

    ```

    Several residuals have names, and a number of examples each. The batch is then one dict:

    ```python
    >>> def start(model, x):
    ...     return model(x) - 1
    >>> loss_fn = sl.LeastSquares({"fit": residual, "start": start}, weights={"start": 10.0})
    >>> batch = {"fit": (x, x**2), "start": jnp.zeros((1, 1))}
    >>> model, opt, loss = sl.train_step(loss_fn)(model, opt, batch)

    ```

    In a loop of your own, write `opt.step(model, grads, residuals=loss_fn.on(x, y))`.

    Arguments that are not arrays, such as numbers, are passed to all examples. Complex residuals
    count as their real and imaginary parts, and as one residual each in the mean.

    Examples can have weights ω: `step(model, opt, x, y, example_weights=weights)`, or a dict of
    them for named residuals. A block is then w·Σ ωᵢ·|rᵢ|² / n, with n the number of all residuals:
    for the mean over the examples of a mask, pass `mask * (mask.size / mask.sum())`; for a
    quadrature with weights q, pass `n * q`.

    **Arguments:**

    - `residuals`: a function `residual(model, *arguments)` of one example that returns a floating
        or complex array of any shape, or a dict of such functions. The data of a named one are a
        tuple of its arguments, or the only argument.
    - `weights`: w, ≥ 0: a number, or a dict from names to numbers. They are arrays, so other
        weights do not recompile. Defaults to 1.
    - `per_example`: whether a residual is a function of one example. With `False` it gets whole
        arrays, as for a trajectory, and its Jacobian is taken at once, by forward or reverse mode,
        whichever is shorter. A bool, or a dict of them.
    - `loss`: `"linear"` for squares, or a loss that outliers hardly affect: `"soft_l1"`, `"huber"`,
        `"cauchy"` or `"arctan"`, as in `scipy.optimize.least_squares`. It replaces |r|² by
        C²·ρ(|r|²/C²), for every number of a residual.
    - `scale`: C, > 0, the size of residuals from which they count as outliers. Another one does not
        recompile. Defaults to 1.
    - `in_axes`: for each argument after the model, 0 if its arrays have an axis of examples, or
        `None` if they are the same for all, as keys and coefficients are. A tuple, or a dict of
        tuples. Defaults to 0 for all.

    **Raises:** `ValueError` that names the block, for a negative weight, and for blocks that are
    unknown, missing or empty.
    """

    terms: dict[str, "_Term"]
    """Each block by its name. A single residual has the name `ONLY`."""
    named: bool = eqx.field(static=True)
    loss: str = eqx.field(static=True)
    scale: Float[Array, ""]

    def __init__(
        self,
        residuals: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        weights: Mapping[str, Any] | Any = None,
        per_example: Mapping[str, bool] | bool = True,
        in_axes: Mapping[str, Any] | tuple[int | None, ...] | None = None,
        *,
        loss: str = "linear",
        scale: Any = 1.0,
    ):
        self.named = isinstance(residuals, Mapping)
        functions = dict(residuals) if isinstance(residuals, Mapping) else {ONLY: residuals}
        if not functions:
            raise ValueError("LeastSquares needs at least one residual, got an empty dict.")
        if self.named and weights is not None and not isinstance(weights, Mapping):
            raise TypeError(
                f"LeastSquares.weights must be a dict from blocks to numbers, got {weights!r}."
            )

        def by_name(what: str, option: Any, default: Any) -> list[Any]:
            """An option of each block."""
            if isinstance(option, Mapping):
                _check_names(f"LeastSquares.{what} names", option, functions)
                return [option.get(name, default) for name in functions]
            return [default if option is None else option] * len(functions)

        weights = by_name("weights", weights, 1.0)
        flags, axes = by_name("per_example", per_example, True), by_name("in_axes", in_axes, None)
        self.terms = {}
        for (name, function), *options in zip(functions.items(), weights, flags, axes, strict=True):
            label = f"block '{name}'" if self.named else "the residual"
            self.terms[name] = _Term(label, function, *options)
        if loss not in LOSSES:
            raise ValueError(
                f"LeastSquares.loss must be one of {', '.join(map(repr, LOSSES))}, got {loss!r}."
            )
        if not isinstance(scale, Tracer) and not 0 < nearest_float(scale) < np.inf:
            got = nearest_float(scale)
            raise ValueError(f"LeastSquares.scale must be positive and finite, got {got}.")
        self.loss, self.scale = loss, tree.as_canonical(scale)

    def on(self, *args: Any, example_weights: Any = None, **others: Any) -> Residuals:
        if others:
            raise TypeError(
                f"LeastSquares takes the data by position, got the keyword '{next(iter(others))}'. "
                "Put everything else into the residual: `sl.LeastSquares(functools.partial("
                "residual, name=value))`."
            )
        robust = None if self.loss == "linear" else (self.loss, self.scale)
        data, omegas = self._data(args), self._example_weights(example_weights)
        blocks = []
        for name, term in self.terms.items():
            arguments, omega = data[name], omegas.get(name)
            rows, shared = None, arguments
            if term.per_example:
                rows, shared = divided(term.label, arguments, term.axes_of(arguments))
            blocks.append(_Squares(rows, shared, term, omega, robust))
        return Residuals(tuple(blocks))

    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        names = {}
        for name, data in self._data(args).items():
            term = self.terms[name]
            label = name if term.per_example else WHOLE
            flags = with_examples(data, term.axes_of(data))
            names[name] = jax.tree.map(lambda has, label=label: label if has else WHOLE, flags)
        omegas = {key: self._example_weights(x) for key, x in kwargs.items()}
        return names, {
            key: {name: jax.tree.map(lambda _, n=name: n, w) for name, w in omega.items()}
            for key, omega in omegas.items()
        }

    def _data(self, args: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
        """The arguments of each block."""
        if not self.named:
            return {ONLY: args}
        if len(args) != 1 or not isinstance(args[0], Mapping):
            listed = ", ".join(f"{name!r}: ..." for name in self.terms)
            raise TypeError(
                "The batch of several residuals is one dict with the data of each: "
                f"`step(model, opt, {{{listed}}})`, got {len(args)} argument"
                f"{'s' * (len(args) != 1)}"
                f"{f' of type {type(args[0]).__name__}' if len(args) == 1 else ''}."
            )
        (batch,) = args
        for name in self.terms:
            if name not in batch:
                raise ValueError(f"The batch has no data for block '{name}'.")
        _check_names("The batch has data for", batch, self.terms)
        return {name: as_arguments(batch[name]) for name in self.terms}

    def _example_weights(self, weights: Any) -> Mapping[str, Any]:
        if weights is None:
            return {}
        if not self.named:
            return {ONLY: weights}
        if not isinstance(weights, Mapping):
            raise TypeError(
                "`example_weights` must be a dict from blocks to arrays, such as "
                f"`{{{next(iter(self.terms))!r}: weights}}`, got {type(weights).__name__}."
            )
        _check_names("`example_weights` names", weights, self.terms)
        return weights


def _check_names(what: str, names: Iterable[Any], blocks: Collection[str]) -> None:
    for name in names:
        if name not in blocks:
            listed = candidates(str(name), blocks)
            raise ValueError(f"{what} {name!r}, which is no block. Blocks: {listed}.")


class _Term(eqx.Module):
    """A residual and its options."""

    label: str = eqx.field(static=True)
    """What messages call it."""
    residual: Any
    """As a tree, so that functions which differ in the arrays that they carry share a program."""
    weight: Float[Array, ""]
    per_example: bool = eqx.field(static=True)
    in_axes: tuple[bool, ...] | None = eqx.field(static=True)

    def __init__(self, label: str, residual: Any, weight: Any, per_example: Any, in_axes: Any):
        self.label, self.residual = label, as_tree(residual)
        if not callable(self.residual):
            raise TypeError(
                f"LeastSquares takes functions of the model and one example, got {residual!r} for "
                f"{label}."
            )
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        scalar = tree.is_array(weight) and jnp.shape(weight) == () and not jnp.iscomplexobj(weight)
        if not number and not scalar:
            raise TypeError(f"The weight of {label} must be a real number, got {weight!r}.")
        if not isinstance(weight, Tracer) and not 0 <= nearest_float(weight) < np.inf:
            got = nearest_float(weight)
            raise ValueError(f"The weight of {label} must be non-negative and finite, got {got}.")
        self.weight = tree.as_canonical(weight)
        check_bool(f"LeastSquares.per_example of {label}", per_example)
        self.per_example = per_example
        is_tuple = isinstance(in_axes, tuple | list)
        if not (in_axes is None or (is_tuple and all(a is None or a == 0 for a in in_axes))):
            raise TypeError(
                f"LeastSquares.in_axes must be a tuple of 0 and None, one for each argument after "
                f"the model, got {in_axes!r} for {label}."
            )
        self.in_axes = None if in_axes is None else tuple(a is not None for a in in_axes)

    def axes_of(self, arguments: tuple[Any, ...]) -> tuple[bool, ...]:
        """Whether each argument has an axis of examples."""
        if self.in_axes is None:
            return (True,) * len(arguments)
        if len(self.in_axes) != len(arguments):
            raise ValueError(
                f"LeastSquares.in_axes has {len(self.in_axes)} entries for {self.label}, "
                f"which got {len(arguments)} arguments."
            )
        return self.in_axes


def _soft_l1(z: Array) -> tuple[Array, Array, Array]:
    root = jnp.sqrt(1 + z)
    return 2 * z / (1 + root), 1 / root, -0.5 / root**3


def _huber(z: Array) -> tuple[Array, Array, Array]:
    root = jnp.sqrt(jnp.where(z <= 1, 1, z))
    return (
        jnp.where(z <= 1, z, 2 * root - 1),
        1 / root,
        jnp.where(z <= 1, 0, -0.5 / root**3),
    )


def _cauchy(z: Array) -> tuple[Array, Array, Array]:
    return jnp.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2


def _arctan(z: Array) -> tuple[Array, Array, Array]:
    inverse = 1 / (1 + z**2)
    return jnp.arctan(z), inverse, -2 * z * inverse**2


LOSSES = {
    "linear": None,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}
"""ρ and its first two derivatives."""


class _Squares(AbstractBlock):
    """w·Σ ω·|r|² / n, with outputs r / √entries of one example."""

    term: _Term
    example_weights: Float[Array, " examples"] | None
    robust: tuple[str, Float[Array, ""]] | None
    """The name of another loss than squares, and its scale."""

    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        arguments = self.shared if row is None else eqx.combine(row, self.shared)
        label, residual = self.term.label, self.term.residual
        r = call_of_example(
            f"The function of {label}", residual, "model", params, "argument", arguments
        )
        if isinstance(r, float | complex):
            r = jnp.asarray(r)
        if not tree.is_inexact(r):
            kind = f"dtype {r.dtype}" if tree.is_array(r) else f"type {type(r).__name__}"
            raise TypeError(
                f"A residual must return a floating or complex array, and {label} returned {kind}."
            )
        if not r.size:
            raise ValueError(f"{label[0].upper()}{label[1:]} returned an empty array.")
        real = as_real(r)
        dtype = tree.accumulation_dtype(real.dtype)
        return real.astype(dtype) * jnp.asarray(r.size**-0.5, dtype)

    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        number = outputs.shape[0]
        each = jnp.full(number, 1 / number, outputs.dtype)
        if self.example_weights is not None:
            each = each * jnp.asarray(self.example_weights, outputs.dtype)
        each = each * jnp.asarray(self.term.weight, outputs.dtype)
        if self.robust is not None:
            return _robust(outputs, each[:, None], *self.robust)
        value = jnp.sum(each[:, None] * outputs**2)
        factors = jnp.sqrt(2 * each)
        vector = factors[:, None] * outputs
        return Local(value, factors[:, None] * vector, factors, vector)

    def __check_init__(self):
        omega, label = self.example_weights, self.term.label
        shape = getattr(omega, "shape", type(omega).__name__)
        if omega is not None and shape != (self.size,):
            raise ValueError(
                f"The example weights of {label} must be an array of shape ({self.size},), a "
                f"weight for each example, got {shape}."
            )
        negative = False if omega is None else jnp.any(omega < 0)
        # Traced also where the weights are known, inside of `jax.jit`.
        if not isinstance(negative, Tracer) and negative:
            raise ValueError(f"The example weights of {label} must be non-negative.")


def _robust(outputs: Array, each: Array, name: str, scale: Array) -> Local:
    """With the curvature of the loss as far as it is positive, as SciPy and Ceres have it."""
    size = scale.astype(outputs.dtype) ** 2 / outputs.shape[1]
    rho, slope, bend = LOSSES[name](outputs**2 / size)
    cotangents = 2 * each * slope * outputs
    curved = slope + 2 * bend * outputs**2 / size
    factors = jnp.sqrt(2 * each * jnp.maximum(curved, jnp.finfo(outputs.dtype).eps))
    # An example without weight has neither.
    safe = jnp.where(factors > 0, factors, 1)
    return Local(jnp.sum(each * size * rho), cotangents, factors, cotangents / safe)
