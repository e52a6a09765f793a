"""Losses of outputs whose curvature is known: their base, convex losses, and energies."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from ... import tree
from ..._core.protocol.linearization import AbstractBlock, Local
from ..._core.protocol.loss import Loss
from ..._core.protocol.real_vectors import as_real
from ..._core.protocol.residuals import Residuals
from ..._core.text.calls import call
from ...tree.types import Scalar, Updates
from ..binding.model import Split

WHOLE = ""
"""The label of arguments without an axis of examples."""


class AbstractCurvatureLoss(eqx.Module):
    """A loss of outputs of single examples. It knows its curvature as well as its value."""

    fixed_data: ClassVar[str | None] = None
    """The reason why the loss at other parameters has another value, if there is one."""

    __frozen__: ClassVar[tuple[str, ...]] = ("**",)

    @abc.abstractmethod
    def on(self, *args: Any, **kwargs: Any) -> Residuals:
        """The loss on these data, as a function of the model.

        Pass it to `opt.step(model, grads, residuals=loss_fn.on(x, y))`. `sl.train_step` passes it
        itself.

        **Arguments:**

        - `args`, `kwargs`: as for the loss, after the model.
        """

    @abc.abstractmethod
    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        """For each leaf of the arguments the name of its axis of examples; `""` for none."""

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Scalar:
        """The loss."""
        return self.on(*args, **kwargs).value(model)


def as_arguments(data: Any) -> tuple[Any, ...]:
    """The data of a block as the arguments of its function: a tuple is several."""
    return tuple(data) if isinstance(data, tuple | list) else (data,)


def with_examples(arguments: tuple[Any, ...], axes: tuple[bool, ...]) -> PyTree:
    """For each leaf whether it is an array with an axis of examples."""
    return tuple(
        jax.tree.map(lambda x, has=has: has and tree.is_array(x), data)
        for data, has in zip(arguments, axes, strict=True)
    )


def call_of_example(
    what: str, function: Callable[..., Any], first: str, value: Any, others: str, data: PyTree
) -> Any:
    """The result of a function of the user for one example.

    **Arguments:**

    - `what`: the function, for messages.
    - `first`, `value`: the name and the value of its first argument.
    - `others`, `data`: the name and the values of the others.
    """
    names = [others] if len(data) == 1 else [f"{others}_{i}" for i in range(len(data))]
    return call(what, function, **{first: value}, **dict(zip(names, data, strict=True)))


def divided(name: str, arguments: tuple[Any, ...], axes: tuple[bool, ...]) -> tuple[Any, Any]:
    """Divides the arguments into leaves with an axis of examples and the rest.

    Raises an error that names the block if there is none, or if they are of several sizes.
    """
    flags = with_examples(arguments, axes)
    rows, shared = eqx.partition(arguments, flags)
    sizes = {}
    for i, data in enumerate(rows):
        for x in jax.tree.leaves(data):
            if x.ndim == 0:
                raise ValueError(
                    f"Argument {i} of {name} has no axis of examples. Pass an array with one, or "
                    f"name those without in `in_axes`, such as "
                    f"`in_axes={tuple(None if j == i else 0 for j in range(len(arguments)))}`."
                )
            sizes.setdefault(x.shape[0], i)
    if not sizes:
        raise ValueError(
            f"{name[0].upper()}{name[1:]} has no array with an axis of examples. Pass one, or "
            "write `per_example=False` for a residual of all data at once."
        )
    if len(sizes) > 1:
        (size, i), (other, j), *_ = sizes.items()
        raise ValueError(
            f"The arguments of {name} have different numbers of examples: argument {i} has "
            f"{size}, and argument {j} has {other}. Name those without an axis of examples in "
            "`in_axes`."
        )
    if 0 in sizes:
        raise ValueError(f"{name[0].upper()}{name[1:]} has no examples: its arrays are empty.")
    return jax.tree.map(jnp.asarray, rows), shared


def linearized(
    source: AbstractCurvatureLoss, inputs: Any, model: Split, loss: Loss
) -> tuple[Residuals, Scalar, Updates]:
    """The loss on its data, the `args` and `kwargs` of the inputs of a program, with a
    linearization that the rules share, its value and its gradient."""
    chunks = [getattr(part.module, "chunk", None) for part in loss.askers.get("residuals", ())]
    residuals = source.on(*inputs.args, **inputs.kwargs)
    linear = residuals.of(model.join).at(model.params, chunks[0])
    gradient = tree.cast_like(linear.updates(linear.gradient), model.params)
    return residuals.with_known(linear), linear.value, gradient


class OutputLoss(AbstractCurvatureLoss):
    """The mean of a convex loss of the outputs of a model, such as a cross-entropy.

    With outputs zᵢ = F(w, xᵢ) and their Jacobian Jᵢ, curvature rules use the generalized
    Gauss–Newton matrix

        mean Jᵢᵀ·Hᵢ·Jᵢ,   Hᵢ = ∇²ℓ(zᵢ)

    which is the Fisher matrix if ℓ is the negative log-likelihood of an exponential family in its
    natural parameters. `sl.LeastSquares` is the case of a squared loss. Negative eigenvalues of Hᵢ
    count as 0.

    ```python
    >>> def loss_of_outputs(logits, label):
    ...     return -jax.nn.log_softmax(logits)[label]
    >>> loss_fn = sl.OutputLoss(lambda model, x: model(x), loss_of_outputs)
    >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.natural_gradient(0.1, damping=1e-2), model)
    >>> x, labels = jax.random.normal(jax.random.key(1), (30, 2)), jnp.arange(30) % 3
    >>> model, opt, loss = sl.train_step(loss_fn)(model, opt, x, labels)

    ```

    It is called as `loss_fn(model, inputs, targets)`. A tuple of inputs or targets is several
    arguments.

    **Arguments:**

    - `outputs_fn`: a function `outputs_fn(model, *inputs)` of one example that returns a real
        array.
    - `loss_of_outputs`: a function `loss_of_outputs(outputs, *targets)` of one example that
        returns a real scalar.

    ??? cite "Schraudolph, [Fast Curvature Matrix-Vector Products for Second-Order Gradient
        Descent](https://doi.org/10.1162/08997660260028683), 2002"
    """

    outputs_fn: Callable[..., Any]
    loss_of_outputs: Callable[..., Any]

    def on(self, inputs: Any, targets: Any = ()) -> Residuals:
        inputs, targets = as_arguments(inputs), as_arguments(targets)
        everything = (*inputs, *targets)
        rows, shared = divided("the outputs", everything, (True,) * len(everything))
        return Residuals((_OutputBlock(rows, shared, self, len(inputs)),))

    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        leaves = (args, dict(kwargs))
        return jax.tree.map(lambda x: "outputs" if tree.is_array(x) else WHOLE, leaves)


class _OutputBlock(AbstractBlock):
    """The mean of ℓ(F(w, x), y)."""

    loss: OutputLoss
    num_inputs: int = eqx.field(static=True)

    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        inputs = eqx.combine(row, self.shared)[: self.num_inputs]
        z = call_of_example("`outputs_fn`", self.loss.outputs_fn, "model", params, "input", inputs)
        if not tree.is_inexact(z) or jnp.iscomplexobj(z):
            kind = f"dtype {z.dtype}" if tree.is_array(z) else f"type {type(z).__name__}"
            raise TypeError(f"`outputs_fn` must return a real floating array, got {kind}.")
        return z.reshape(-1)

    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        number, dtype = outputs.shape[0], outputs.dtype

        def loss_of(z: Array, row: PyTree) -> Array:
            targets = eqx.combine(row, self.shared)[self.num_inputs :]
            value = call_of_example(
                "`loss_of_outputs`", self.loss.loss_of_outputs, "outputs", z, "target", targets
            )
            if not tree.is_array(value) and not isinstance(value, int | float):
                raise TypeError(
                    "`loss_of_outputs` must return a scalar for one example, got type "
                    f"{type(value).__name__}."
                )
            if jnp.shape(value) != ():
                raise ValueError(
                    "`loss_of_outputs` must return a scalar for one example, got shape "
                    f"{jnp.shape(value)}."
                )
            return jnp.asarray(value, dtype)

        def second(z: Array, row: PyTree) -> Array:
            return jax.jacfwd(jax.grad(loss_of))(z, row)

        values, grads = jax.vmap(jax.value_and_grad(loss_of))(outputs, self.rows)
        hessians = jax.vmap(second)(outputs, self.rows)
        roots = _root(hessians) * jnp.asarray(number**-0.5, dtype)
        return Local(jnp.mean(values), grads / number, roots, None)


def _root(matrices: Float[Array, "examples k k"]) -> Float[Array, "examples k k"]:
    """The symmetric square roots of matrices without negative eigenvalues."""
    values, vectors = jnp.linalg.eigh((matrices + jnp.swapaxes(matrices, -1, -2)) / 2)
    roots = jnp.sqrt(jnp.maximum(values, 0))
    return tree.matmul(vectors * roots[:, None, :], vectors.mT)


class VariationalEnergy(AbstractCurvatureLoss):
    """The mean of local energies over samples of |ψ|², whose gradient comes from the scores.

    With scores Oᵢ = ∂ log ψ(w, sᵢ) and local energies Eᵢ, curvature rules use

        ∇E = 2·Re mean (Oᵢ − Ō)*·(Eᵢ − Ē),   S = Re mean (Oᵢ − Ō)*·(Oᵢ − Ō)ᵀ

    so that `sl.natural_gradient` steps along S⁻¹·∇E, the direction of stochastic reconfiguration,
    or with momentum that of SPRING. These are usually written with the force ∇E/2: a step with the
    learning rate η is theirs with 2·η, so take half of a rate from there. It is a loss for every
    rule: its gradient is ∇E.

    It is called as `loss_fn(model, samples, local_energies)`. The local energies are given, so the
    loss at other parameters is not known, and rules with a line search are refused.

    ```python
    >>> def log_psi(model, s):
    ...     return -model["a"] * jnp.sum(s**2)
    >>> loss_fn = sl.VariationalEnergy(log_psi)
    >>> model, s = {"a": jnp.array(0.3)}, jax.random.normal(jax.random.key(0), (50, 1))
    >>> energies = model["a"] + (0.5 - 2 * model["a"] ** 2) * s[:, 0] ** 2
    >>> opt = sl.Optimizer(sl.natural_gradient(0.05), model)
    >>> model, opt, energy = sl.train_step(loss_fn)(model, opt, s, energies)

    ```

    **Arguments:**

    - `log_psi`: a function `log_psi(model, *sample)` of one sample that returns a real or complex
        scalar.

    ??? cite "Sorella, [Green Function Monte Carlo with Stochastic
        Reconfiguration](https://doi.org/10.1103/PhysRevLett.80.4558), 1998; Chen & Heyl, [Efficient
        optimization of deep neural quantum states toward machine
        precision](https://arxiv.org/abs/2302.01941), 2023"
    """

    log_psi: Callable[..., Any]

    fixed_data: ClassVar[str | None] = "its local energies are those of the current parameters"

    def on(self, samples: Any, local_energies: Any) -> Residuals:
        if not tree.is_array(local_energies) or local_energies.ndim != 1:
            shape = getattr(local_energies, "shape", type(local_energies).__name__)
            raise ValueError(f"`local_energies` must have an entry for each sample, got {shape}.")
        samples = as_arguments(samples)
        axes = (True,) * (len(samples) + 1)
        rows, shared = divided("the energy", (*samples, local_energies), axes)
        block = _Scores(rows[:-1], shared[:-1], rows[-1], self.log_psi)
        return Residuals((block,), searchable=False)

    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        raise ValueError(
            "VariationalEnergy subtracts means over all samples, so its batch cannot be divided. "
            "Pass `chunk=` to the rule to save memory."
        )

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Scalar:
        """The mean energy."""
        (block,) = self.on(*args, **kwargs).blocks
        z = jax.vmap(lambda row: block.outputs(model, row))(block.rows)
        local = block.local(jax.lax.stop_gradient(z))
        # The value is the mean, and the derivative is that of the scores.
        return local.value + jnp.sum(local.cotangents * (z - jax.lax.stop_gradient(z)))


class _Scores(AbstractBlock):
    energies: Inexact[Array, " samples"]
    log_psi: Callable[..., Any]

    centred: ClassVar[bool] = True

    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        sample = eqx.combine(row, self.shared)
        z = call_of_example("`log_psi`", self.log_psi, "model", params, "sample", sample)
        if not tree.is_inexact(z) or z.shape != ():
            kind = f"{z.dtype}{z.shape}" if tree.is_array(z) else f"type {type(z).__name__}"
            raise TypeError(f"`log_psi` must return a floating or complex scalar, got {kind}.")
        return as_real(z)

    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        number, dtype = outputs.shape[0], outputs.dtype
        parts = [self.energies.real, self.energies.imag][: outputs.shape[1]]
        energies = jnp.stack([x.astype(dtype) for x in parts], axis=1)
        errors = energies - jnp.mean(energies, 0, keepdims=True)
        share = jnp.full(number, number**-0.5, dtype)
        vector = 2 * share[:, None] * errors
        return Local(jnp.mean(energies[:, 0]), share[:, None] * vector, share, vector)
