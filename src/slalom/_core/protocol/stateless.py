"""Rules without state."""

import abc

from ... import tree
from ...tree.types import Params, Updates
from .context import Context
from .transform import AbstractTransform, advise_inputs


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
        del state
        return self.apply(updates, params, context), None
