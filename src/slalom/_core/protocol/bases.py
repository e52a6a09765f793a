"""Bases of transforms: with a `run`, without state, of single examples, and that write parameters
themselves."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ... import tree
from ...tree.types import Gradients, Params, PyTree, Updates
from .context import Context
from .parts import Part, parts
from .transform import AbstractTransform, State, advise_inputs, pair
from .writer import ADD, RETURN, Writer


class AbstractRunTransform(AbstractTransform[State]):
    """A transform that is written as `run`, which then serves both `update` and `step`.

    One that is made of others also writes `children`. It runs its parts with `part.run(write,
    updates)`, and uses `write.idle` for a step in which a part does not run.
    """

    @abc.abstractmethod
    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, State]:
        """See `AbstractTransform.run`."""

    @advise_inputs
    def update(
        self,
        updates: Gradients,
        state: State,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, State]:
        here = Part.root(self, state, context or Context(), params)
        return self.run(here, RETURN, updates)

    @advise_inputs
    def step(
        self, grads: Gradients, state: State, params: Params, context: Context | None = None
    ) -> tuple[Params, State]:
        here = Part.root(self, state, context or Context(), params)
        return self.run(here, ADD, grads)


class AbstractStatelessTransform(AbstractTransform[None]):
    """A rule without state: from the updates, and perhaps the parameters, to new updates.

    To write one, subclass this, declare the fields, and write `apply`:

    ```python
    >>> class ScaleBySign(sl.AbstractStatelessTransform):
    ...     def apply(self, updates, params, context):
    ...         return jax.tree.map(jnp.sign, updates)
    >>> ScaleBySign() | sl.ScaleByLearningRate(0.1)
    ScaleBySign() | sl.ScaleByLearningRate(0.1)

    ```
    """

    @abc.abstractmethod
    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        """Transforms updates.

        **Arguments:**

        - `updates`, `params`, `context`: as for `update`.

        **Returns:** the new updates, in the accumulation dtype.
        """

    def init(self, params: Params) -> None:
        return tree.no_state(params)

    @advise_inputs
    def update(
        self,
        updates: Updates,
        state: None,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, None]:
        return pair(self, (self.apply(updates, params, context), None), updates)


class AbstractPerExampleTransform(AbstractTransform[State]):
    """A first link whose gradients have a leading axis of examples.

    A subclass implements `init`, `gather` and `finish`. A training step may process the parts of a
    batch in sequence: it adds up the results of `gather` and calls `finish` once.
    """

    per_example: ClassVar[bool] = True

    @abc.abstractmethod
    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        """Sums over examples.

        **Arguments:**

        - `grads`: gradients with a leading axis of examples.
        - `context`: the `sl.Context` of the step.

        **Returns:** a tree like the parameters, in at least float32, and any tree of other sums,
        such as counts.
        """

    @abc.abstractmethod
    def finish(
        self, total: Updates, counts: PyTree, size: int, state: State, context: Context | None
    ) -> tuple[Updates, State]:
        """Computes the updates from the sums over the whole batch.

        **Arguments:**

        - `total`, `counts`: the results of `gather`, summed over the parts of the batch.
        - `size`: the number of examples.
        - `state`, `context`: as for `update`.

        **Returns:** the updates and the new state, as `update` does.
        """

    def update(
        self,
        updates: Gradients,
        state: State,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, State]:
        if context is not None and context.gathered is not None:
            return self.finish(updates, *context.gathered, state, context)
        leaves = jax.tree.leaves(updates)
        size = leaves[0].shape[0] if leaves and self.per_example else 1
        total, counts = self.gather(updates, context)
        return self.finish(total, counts, size, state, context)


class AbstractParameterWriter(AbstractTransform[State]):
    """A transform that writes parameters itself, and keeps other parameters to evaluate.

    A subclass writes `init`, `update`, `step` and `eval_params`. It must be the last link of a
    chain: a later link could not change the written parameters.
    """

    @abc.abstractmethod
    def step(
        self, grads: Gradients, state: State, params: Params, context: Context | None = None
    ) -> tuple[Params, State]:
        """See `AbstractTransform.step`."""

    @abc.abstractmethod
    def eval_params(self, here: Part) -> Params:
        """The parameters to evaluate.

        **Arguments:**

        - `here`: this transform with its state, the parameters that are trained, and a context
            with the clock of the next step.

        **Returns:** a tree like the parameters, in any precision. Its arrays must not be the
        state's own: the next step may donate those.
        """

    def full_params(self, here: Part) -> Params:
        """The parameters to evaluate, in the precision in which they are kept.

        **Arguments, Returns:** as for `eval_params`.
        """
        return self.eval_params(here)


def params_to_evaluate(here: Part, *, full_precision: bool = False) -> Params:
    """The parameters to evaluate: at each leaf, those of the outermost writer that acts on it.

    **Arguments:**

    - `here`: a transform with its state, context, and the parameters that are trained.
    - `full_precision`: whether to keep the precision of the writer, or to use that of the
        parameters.
    """
    leaves, structure = jax.tree.flatten(here.params, is_leaf=lambda x: x is None)
    is_taken = [False] * len(leaves)
    for part in parts(here.module, here.state, here.context, here.params):
        if isinstance(part.module, AbstractParameterWriter) and jax.tree.leaves(part.params):
            method = part.module.full_params if full_precision else part.module.eval_params
            params = method(part)
            for i, x in enumerate(structure.flatten_up_to(params)):
                if x is not None and not is_taken[i]:
                    leaves[i] = x if full_precision else jnp.asarray(x, leaves[i].dtype)
                    is_taken[i] = True
    return structure.unflatten(leaves)
