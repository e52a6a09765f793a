"""Matrix rules, next to their matrix products on their own."""

import re
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from ..docs import _table
from ..matrices import Products, is_hidden
from ..measure import step_of
from .timing import Chained, Repeated, log, seconds


def hidden_of(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hidden matrices of a model, with random entries, and gradients of theirs."""
    key = jax.random.key(0)
    hidden = {
        name: 0.02 * jax.random.normal(jax.random.fold_in(key, i), p.shape)
        for i, (name, p) in enumerate(params.items())
        if is_hidden(name, p) or (len(params) < 4 and p.ndim == 2)
    }
    return hidden, {name: 0.1 * p[::-1] for name, p in hidden.items()}


def muon(params: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Steps of Muon, next to their matrix products on their own, in three precisions."""
    hidden, grads = hidden_of(params)
    rows = []
    precisions = {"float32": "highest", "TensorFloat32": "tensorfloat32", "bfloat16": "bfloat16"}
    for precision, name in precisions.items():
        with jax.default_matmul_precision(name):
            link = sl.Orthogonalize()
            step = step_of(link | sl.ScaleByLearningRate(0.02), hidden, grads)
            state = link.init(hidden)
            limit = Products(lambda u, link=link, state=state: link.update(u, state), grads)
            calls = {"Muon": Chained(step), "products": Repeated(limit)}
            took = seconds(calls, repetitions)
        rows.append(
            {
                "precision": precision,
                "milliseconds": 1e3 * took["Muon"],
                "products_ms": 1e3 * took["products"],
            }
        )
        alone = rows[-1]["products_ms"]
        log(f"Muon, {precision}: {1e3 * took['Muon']:.2f} ms, of products {alone:.2f} ms")
    return rows


REFRESH = 5
"""The number of steps from one refresh of SOAP to the next."""


def soap(params: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Steps of SOAP on the hidden matrices of two blocks, with and without a refresh.

    Each step has gradients of its own, since equal ones would leave the eigenvectors in place. A
    refresh must multiply each factor by its eigenvectors, and turn the mean into the new ones.
    """
    params = {name: p for name, p in params.items() if not re.match(r"block(?![01]\.)", name)}
    hidden, grads = hidden_of(params)
    step = Chained(step_of(sl.soap(3e-3, precondition_frequency=REFRESH), hidden, grads))

    @jax.jit
    def noise(number: int) -> dict[str, Any]:
        key = jax.random.fold_in(jax.random.key(1), number)
        return {name: g + 0.01 * jax.random.normal(key, g.shape) for name, g in grads.items()}

    times = []
    for number in range(2 + 8 * REFRESH):
        step.step.grads = jax.block_until_ready(noise(number))
        start = time.perf_counter()
        step.start()
        step.wait()
        times.append(1e3 * (time.perf_counter() - start))
    row = {
        "idle_ms": statistics.median(times[2:]),
        "refresh_ms": statistics.median(times[6::REFRESH]),
    }

    @jax.jit
    def products(hidden: dict[str, Any]) -> Any:
        def of_one(x: Any) -> Any:
            left, right = x @ x.T, x.T @ x
            turned = left @ (left.T @ (left @ x @ right) @ right.T)
            return left @ left, right @ right, turned

        with jax.default_matmul_precision("highest"):
            return {name: of_one(x) for name, x in hidden.items()}

    jax.block_until_ready(products(hidden))
    call = Repeated(lambda: jax.block_until_ready(products(hidden)))
    row["products_ms"] = 1e3 * seconds({"products": call}, repetitions)["products"]
    log(f"SOAP: {row}")
    return [row]


def factorizations() -> list[dict[str, Any]]:
    """Times of a product, a QR decomposition, and the pieces of a round of Cholesky's method."""
    rows = []
    for number, size in ((1, 768), (1, 2304), (1, 3072), (12, 768)):
        x = jax.random.normal(jax.random.key(0), (number, size, size))
        x = x[0] if number == 1 else x
        gram = x @ x.mT / size + jnp.eye(size)
        factor = jnp.linalg.cholesky(gram)
        calls: dict[str, tuple[Any, ...]] = {
            "product": (lambda a, b: a @ b, x, x),
            "qr": (lambda a: jnp.linalg.qr(a)[0], x),
            "cholesky": (lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False), gram),
            "solve": (
                lambda a, b: jax.lax.linalg.triangular_solve(
                    a, b, left_side=False, lower=True, transpose_a=True
                ),
                factor,
                x,
            ),
        }
        row: dict[str, Any] = {"device": jax.devices()[0].device_kind, "number": number}
        row["size"] = size
        with jax.default_matmul_precision("highest"):
            for name, (function, *arguments) in calls.items():
                compiled = jax.jit(function).lower(*arguments).compile()
                call = Repeated(lambda f=compiled, a=arguments: jax.block_until_ready(f(*a)))
                row[f"{name}_ms"] = 1e3 * seconds({name: call}, 1)[name]
        rows.append(row)
        log(f"factorizations: {row}")
    return rows


def text(found: dict[str, Any]) -> list[str]:
    """The tables and sentences for the page."""
    parts = []
    if rows := found.get("matrices"):
        heads = ["step on the hidden matrices", "precision of products", "time", "products alone"]
        lines = [
            [
                "Muon",
                row["precision"],
                f"{row['milliseconds']:.2f} ms",
                f"{row['products_ms']:.2f} ms",
            ]
            for row in rows
        ]
        parts.append(_table(heads, lines))
    if rows := found.get("factorizations"):
        heads = ["matrices", "product", "QR", "Cholesky", "triangular solve"]
        names = ("product_ms", "qr_ms", "cholesky_ms", "solve_ms")
        lines = [
            [f"{row['number']} of {row['size']}²", *(f"{row[name]:.1f} ms" for name in names)]
            for row in rows
        ]
        parts += [f"Factorizations in float32 on one {rows[0]['device']}:", _table(heads, lines)]
    for row in found.get("soap", []):
        ratio = row["refresh_ms"] / row["products_ms"]
        parts.append(
            f"SOAP on the hidden matrices of two blocks takes {row['idle_ms']:.1f} ms, and "
            f"{row['refresh_ms']:.0f} ms in a step that refreshes its eigenvectors, {ratio:.1f} "
            "times the matrix products of a refresh alone."
        )
    return parts
