"""Modules that declare their fields, check them when created, and print as code."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ...tree.types import Params
from ..engine.encoded import has_rest
from ..engine.manual_axes import refuse_parts
from ..text.advice import check_keywords
from ..text.printing import AbstractPrinted

CHECK = "slalom.check"
"""The key of a field's check in its metadata: a function of the field's name and value."""


class Part(NamedTuple):
    """A module inside another one: its path, and what it sees there.

    `AbstractWrapper.inner_part` returns the part for the inner transform of a wrapper.

    **Arguments:**

    - `path`: the segments of its path below the outer module.
    - `module`: a transform, a skip condition or a stateful schedule.
    - `state`: its state.
    - `context`: the `Context` that it sees, with its own clock.
    - `params`: the parameters that it acts on.
    - `get`: a function from the outer module to this one, for `eqx.tree_at`.
    - `group`: the labels of the partition groups around it.
    """

    path: tuple[str, ...]
    module: Any
    state: Any
    context: Any
    params: Params | None
    get: Callable[[Any], Any]
    group: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def run(self, write: Any, updates: Any) -> tuple[Any, Any]:
        """Runs this transform, under its name in profiles.

        **Arguments:**

        - `write`: the `Writer` for its updates.
        - `updates`: the incoming updates.

        **Returns:** what `write` makes of the transform's updates, and its new state.
        """
        module = self.module
        self.refuse_parts(updates)
        with jax.named_scope("/".join(self.path)) if self.path else contextlib.nullcontext():
            if has_rest((self.state, updates)):
                return module.run_at_rest(self, write, updates)
            return module.run(write, updates, self.state, self.params, self.context)

    def refuse_parts(self, updates: Any) -> None:
        """Raises an error inside a `jax.shard_map` if this needs more than its device has."""
        if not (self.module.elementwise or self.module.over == "tree"):
            refuse_parts(type(self.module).__name__, updates, self.params)


class AbstractDeclared(AbstractPrinted):
    """The base of transforms, skip conditions and schedules: fields and parts are declared."""

    if not TYPE_CHECKING:  # a type checker reads `__init__`

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs:
                check_keywords(cls.__init__, cls.__name__, kwargs)
            return super().__new__(cls)

    def children(
        self, state: Any = None, context: Any = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        """The parts of this module that have hyperparameters, state or a clock.

        Everything that inspects or edits a composition goes through this method: hyperparameters,
        `state_of`, `describe`, `reset`, `rebind`. A part that is not returned here does not exist
        for them.

        **Arguments:**

        - `state`, `context`, `params`: those of this module, if they are known.

        **Returns:** the direct parts by name, each with its own state, context and parameters.
        """
        del state, context, params
        return ()

    def __check_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata.get(CHECK)
            value = getattr(self, field.name)
            optional = field.default is None and value is None
            if check is not None and not optional:
                check(f"{type(self).__name__}.{field.name}", value)
            flag = field.type is bool and field.metadata.get("static", False)
            if flag and not isinstance(value, bool | np.bool_):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} must be True or False, got {value!r}."
                )
