"""Transforms that keep a distribution of the parameters, and need gradients at samples of it."""

import abc
from typing import Any

from ...tree.types import Params
from .context import Context
from .transform import AbstractTransform, State


class AbstractSampler(AbstractTransform[State]):
    """A transform whose gradients must be taken at a sample of the parameters.

    A subclass also writes `noise`. `sl.train_step` and `opt.sample_params` add it to the
    parameters.
    """

    @abc.abstractmethod
    def noise(
        self, state: State, params: Params, context: Context | None, key: Any = None
    ) -> Params:
        """What to add to the parameters for a sample.

        **Arguments:**

        - `state`, `params`, `context`: as for `update`. Only the shapes and dtypes of `params`
            count.
        - `key`: a PRNG key. Defaults to the one in the state, whose sample is where the next
            gradient is taken.

        **Returns:** a tree like `params`, in at least float32.
        """
