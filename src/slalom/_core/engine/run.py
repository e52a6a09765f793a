"""The phases of rules at every leaf.

Each leaf is decoded, advanced, encoded and asked for its direction before the next one is decoded.
Elementwise rules that follow each other in a chain do so together.

A rule that sums over leaves measures all of them before the first one advances. One that sums over
the new state advances all of them before it is asked for a direction. So does one that refreshes
a part of its state in between.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.dtypes import as_float, is_key, is_number
from ...tree.paths import leaf_paths
from ...tree.tracing import entries, traced_once
from ...tree.types import Step
from ..protocol.parts import Part
from ..protocol.writer import ADD, Writer
from ..state.marks import PARAM_LIKE, PER_PARAM, SPREAD, children_by_name, marks, with_fields
from .encoded import (
    as_if_decoded,
    blockwise,
    decoded,
    decoded_leaf,
    for_sums,
    is_encoded,
    seeds_of,
    signal_of,
    stored_like,
)
from .matrices import matrices
from .phases import Again, Fields, LeafInputs, LeafSums, Sums, at_step, measured, phases
from .refresh import differs_between_leaves, refreshed, seen_by_refresh


class RuleAt(NamedTuple):
    """A rule with its context and the leaves that it acts on."""

    part: Part
    leaves: tuple[int, ...]
    """The positions of its leaves among all updates."""


def run_rule(part: Part, write: Writer, updates: PyTree) -> tuple[Any, Any]:
    """The result of one rule, and its new state."""
    number = len(jax.tree.leaves(updates, is_leaf=is_encoded))
    return run_rules(RuleAt(part, tuple(range(number))), write, updates, part)


def run_rules(rules: PyTree, write: Writer, updates: PyTree, outer: Part) -> tuple[Any, Any]:
    """Runs rules at every leaf, one rule after the other.

    **Arguments:**

    - `rules`: a tree of rules, first to last.
    - `write`: as for `AbstractTransform.run`.
    - `updates`: the gradients, which may be encoded.
    - `outer`: the parameters and the context that the rules see.

    **Returns:** the result of `write`, and the tree with the new state of each rule.
    """
    leaves, structure = jax.tree.flatten(updates, is_leaf=is_encoded)
    at, nesting = jax.tree.flatten(rules, is_leaf=lambda x: isinstance(x, RuleAt))
    runs = [_RuleStep(rule, updates, outer) for rule in at]
    targets = None
    if outer.params is not None and (write is ADD or any(blockwise(run.rows) for run in runs)):
        # Elsewhere a policy has its own way to split a sum in place.
        targets = write.in_place(outer.params)
    params: list[Any] = [None] * len(leaves)
    if targets is not None:
        params = structure.flatten_up_to(targets)
    elif any("params" in run.rule.needs for run in runs):
        params = structure.flatten_up_to(write.at_rest(outer.params))
    clock = outer.context.stored_clock
    for run in runs:
        if run.rule.measures:
            run.measure(updates, params)
    does = ("advance", "direction")
    done = [run.refresh(leaves, params) for run in runs if run.refreshes_before == "advance"]
    if any(run.rule.reduces or run.refreshes_before == "direction" for run in runs):
        (run,) = runs
        _over_leaves(runs, ("advance",), leaves, params, clock)
        if run.rule.reduces:
            run.reduce(updates, params)
        if run.refreshes_before == "direction":
            run.refresh(leaves, params)
        does = ("direction",)
    if targets is not None:
        does = (*does, "add")
    result = structure.unflatten(_over_leaves(runs, does, leaves, params, clock, done))
    if targets is None and not write.returns:
        result = write(outer.params, result)
    return result, nesting.unflatten(run.new_state() for run in runs)


def _over_leaves(
    runs: Sequence["_RuleStep"],
    does: tuple[str, ...],
    leaves: Sequence[Any],
    params: Sequence[Any],
    clock: Step | None,
    done: Any = (),
) -> list[Any]:
    """Runs these phases of all rules leaf by leaf, after `done`."""
    rows = [run.rows for run in runs]
    at_leaf = traced_once(functools.partial(_at_leaf, runs), (leaves, rows), (0, 1))
    results: list[Any] = []
    seed_of = {}
    if clock is not None:
        seed_of = seeds_of([x for run in runs for x in run.encoded_names()], clock)
    signal = jnp.bool_(False) if blockwise(rows) else None
    for i, u in enumerate(leaves):
        at = {k: run.positions[i] for k, run in enumerate(runs) if i in run.positions}
        plans = tuple((k, runs[k].plan[n]) for k, n in at.items())
        if any(runs[k].rule.over == "matrix" for k in at):
            u = tree.after(u, done)  # the products of all leaves share scratch memory
        inputs = [runs[k].inputs_of(n, None, None, seed_of) for k, n in at.items()]
        result, new = at_leaf(does, plans, u, params[i], inputs, signal)
        results.append(result)
        done = (result, new)
        if signal is not None:
            signal = signal_of(new, signal)
        for (k, n), fields in zip(at.items(), new, strict="advance" in does):
            runs[k].rows[n] |= fields
    return results


def _at_leaf(
    runs: Sequence["_RuleStep"],
    does: tuple[str, ...],
    plans: tuple[tuple[int, Any], ...],
    u: PyTree,
    p: PyTree,
    inputs: list[LeafInputs],
    signal: Array | None,
) -> tuple[Any, list[dict[str, Any]]]:
    """The result of all rules at one leaf, and their new fields if they advance.

    **Arguments:**

    - `runs`: all rules.
    - `does`: their phases, `"advance"`, `"direction"` or both, and perhaps `"add"`: then the result
        is the new parameter.
    - `plans`: the number of each rule that acts on the leaf, and the result of its `plans` there.
    - `u`, `p`: the update and the parameter, which may be encoded.
    - `inputs`: the other inputs of each rule.
    - `signal`: as for `decoded_leaf`.
    """
    update = like = decoded_leaf(u, signal=signal)
    param = decoded_leaf(p, like)
    new: list[dict[str, Any]] = []
    for (k, plan), at in zip(plans, inputs, strict=True):
        others = {name: param if name == "p" else x for name, x in at.others.items()}
        fields = {name: decoded_leaf(x, like, signal) for name, x in at.fields.items()}
        here = at._replace(u=update, others=others, fields=fields)
        update, stored = phases(runs[k].part, does, plan, here, at)
        new.append(at.fields | stored)
    if "add" in does:
        update = stored_like(p, tree.add(param, update))[0]
    return update, new if "advance" in does else []


class _RuleStep:
    """One step of a rule: its numbers, and its state by fields and leaves."""

    def __init__(self, at: RuleAt, updates: PyTree, outer: Part):
        self.prefix = "".join(f"{segment}." for segment in at.part.path)
        # A rule by itself runs in a scope of its name already.
        part = at.part._replace(path=()) if at.part is outer else at.part
        self.part, self.rule = part, part.module
        self.positions = {leaf: n for n, leaf in enumerate(at.leaves)}
        inside = jax.tree.structure(updates, is_leaf=is_encoded)
        whole = len(at.leaves) == inside.num_leaves
        inside = inside if whole else jax.tree.structure(part.params)
        context = part.context
        trees = {"params": part.params, "grad": context.grad}
        needed = {name: x for name, x in trees.items() if name in self.rule.needs}
        for name, x in needed.items():
            self.rule.demand(name, x)
        mark_of = marks(part.state)
        children = children_by_name(part.state)
        of_leaves = (PARAM_LIKE, PER_PARAM, SPREAD)
        shaped = {n: x for n, x in children.items() if mark_of.get(n) in of_leaves}
        likes = [x for n, x in shaped.items() if mark_of[n] == PARAM_LIKE and jax.tree.leaves(x)]
        if whole:
            tree.check_same_structure(as_if_decoded((updates, *needed.values(), *likes)))
        columns = {
            name: inside.flatten_up_to(x)
            for name, x in shaped.items()
            if jax.tree.leaves(x) or (x is not None and mark_of[name] != PARAM_LIKE)
        }
        self.fields = tuple(columns)
        # The fields of the state of each leaf.
        self.rows = [{name: x[n] for name, x in columns.items()} for n in range(len(at.leaves))]
        self.structure = inside
        self.scalars = Fields(**{n: x for n, x in children.items() if n not in shaped})
        with part.scope():
            self.numbers = vars(self.rule.at(context))  # to which phases may add
            self.now = at_step(self.rule, self.numbers)
            if "value" in self.rule.needs:
                self.now.value = as_float(self.rule.demand("value", context.value))
            self.now.begin(self.scalars)
        of_loss = needed.get("grad")
        self.grads = [None] * len(at.leaves) if of_loss is None else inside.flatten_up_to(of_loss)
        self.shapes = as_if_decoded(updates) if whole else part.params
        if self.rule.over == "matrix":
            self.plan = matrices(self.rule, self.shapes)
        else:
            self.plan = self.rule.plans(self.shapes) or (None,) * len(at.leaves)
            if len(self.plan) != len(at.leaves):
                raise ValueError(
                    f"{type(self.rule).__name__}.plans returned {len(self.plan)} values for "
                    f"{len(at.leaves)} leaves."
                )
        self.sums: list[LeafSums] = [{} for _ in at.leaves]
        self.again: Again = lambda factors: [{} for _ in factors]
        # The phase that comes after `refresh`, if the rule has one.
        self.refreshes_before = self.rule.refresh_before if self.rule.refreshes else None
        self.divide()

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf."""
        return leaf_paths(self.shapes)

    def divide(self) -> None:
        """Gives each leaf its own entry of the numbers of this step that are vectors."""
        vectors = {name: x for name, x in self.numbers.items() if x is not None and x.ndim}
        self.entries = dict(zip(vectors, entries(list(vectors.values())), strict=True))

    def inputs_of(
        self, n: int, u: PyTree, p: PyTree, seed_of: dict[str, Any] | None = None
    ) -> LeafInputs:
        """The inputs of the rule at this position."""
        others = {"params": ("p", p), "grad": ("grad", self.grads[n])}
        needed = dict(others[name] for name in self.rule.needs if name in others)
        fields = dict(self.rows[n])
        seeds = {}
        if seed_of:
            seeds = {x: seed_of[self.name_of(x, n)] for x in fields if is_encoded(fields[x])}
        numbers = self.numbers | {name: each[n] for name, each in self.entries.items()}
        for name, x in numbers.items():
            if is_key(x):
                # From the path, so that a leaf keeps its key when others come or go.
                numbers[name] = jax.random.fold_in(x, zlib.crc32(self.paths[n].encode()))
        return LeafInputs(u, numbers, needed, fields, seeds)

    def encoded_names(self) -> list[str]:
        """The names of encoded leaves of the state."""
        return [
            self.name_of(field, n)
            for n, row in enumerate(self.rows)
            for field, x in row.items()
            if is_encoded(x)
        ]

    def name_of(self, field: str, n: int) -> str:
        """The name of the leaf at this position, from which its random bits follow."""
        return f"{self.prefix}{field}.{self.paths[n]}"

    def measure(self, updates: PyTree, params: Sequence[Any]) -> None:
        """Runs `measure`, and `finish` unless there is more to sum."""
        self._sum("measure", updates, params)
        if not self.rule.reduces:
            self.finish()
        if any(self.rows):
            # Otherwise XLA would copy the old state, which the sums still read.
            scalars = jax.tree.leaves(self.sums)
            false = functools.reduce(jnp.logical_or, map(tree.false_after, scalars))
            for name, x in self.numbers.items():
                if is_number(x):
                    setattr(self.now, name, tree.once_known(x, false))
        self.divide()

    def refresh(self, leaves: Sequence[Array], params: Sequence[Any]) -> list[dict[str, Any]]:
        """Runs `refresh`, if it is due, at all leaves that are not empty, and returns the fields
        that it assigns."""
        at = [(i, n) for i, n in self.positions.items() if leaves[i].size]
        if not at:
            return []

        def see(k: int, fields: dict[str, Any]) -> LeafInputs:
            i, n = at[k]
            inputs = decoded(self.inputs_of(n, leaves[i], params[i]))
            numbers = {
                name: inputs.numbers[name]
                for name, x in self.numbers.items()
                if differs_between_leaves(x)
            }
            inputs = inputs._replace(numbers=numbers, fields=fields)
            return seen_by_refresh(self.part, self.plan[n], inputs)

        of_leaves = [self.rows[n] for _, n in at]
        plans = [self.plan[n] for _, n in at]
        new = refreshed(self.part, self.numbers, see, of_leaves, plans)
        for (_, n), fields in zip(at, new, strict=True):
            self.rows[n] |= fields
        return new

    def reduce(self, updates: PyTree, params: Sequence[Any]) -> None:
        """Runs `reduce` and `finish`."""
        self._sum("reduce", updates, params)
        self.finish()
        self.divide()

    def finish(self) -> None:
        """Runs `finish` in the common precision of all sums, the loss and the scalars."""
        old = {name: x for name, x in vars(self.scalars).items() if _is_float(x)}
        arrays = [*old.values(), *jax.tree.leaves(self.sums)]
        if "value" in self.rule.needs:
            arrays.append(self.now.value)
        dtype = tree.accumulation_dtype(jnp.float32, *(x.dtype for x in arrays))
        for name, x in self.numbers.items():
            setattr(self.now, name, tree.cast(x, dtype) if _is_float(x) else x)
        for name, x in old.items():
            setattr(self.scalars, name, tree.cast(x, dtype))
        with self.part.scope():
            self.now.finish(Sums(self.sums, self.again, dtype), self.scalars)
        for name, x in old.items():
            setattr(self.scalars, name, tree.cast(getattr(self.scalars, name), x.dtype))

    def _sum(self, phase: str, updates: PyTree, params: Sequence[Any]) -> None:
        leaves = for_sums(jax.tree.leaves(updates, is_leaf=is_encoded))
        rows = [self.inputs_of(n, leaves[i], params[i]) for i, n in self.positions.items()]

        def at_leaf(plan: object, inputs: LeafInputs, factors: dict[str, Any]) -> LeafSums:
            return measured(self.part, phase, plan, decoded(inputs), factors)

        at_leaf = traced_once(at_leaf, (leaves, self.rows), 0)

        def added(before: Sequence[LeafSums], factors: Sequence[dict[str, Any]]) -> list[LeafSums]:
            after = map(at_leaf, self.plan, rows, factors)
            return [a | b for a, b in zip(before, after, strict=True)]

        earlier = self.again
        self.again = lambda factors: added(earlier(factors), factors)
        self.sums = added(self.sums, [{}] * len(rows))

    def new_state(self) -> PyTree:
        """The new state."""
        shaped = {
            name: self.structure.unflatten([row[name] for row in self.rows]) for name in self.fields
        }
        return with_fields(self.part.state, vars(self.scalars) | shaped)


def _is_float(x: Any) -> bool:
    return tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
