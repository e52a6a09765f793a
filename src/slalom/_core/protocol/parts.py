"""Modules that declare their fields, check them when created, and print as code."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ... import tree
from ...tree.types import Params
from ..engine.encoded import blockwise, decoded, encoded_again, has_encoded
from ..engine.manual_axes import refuse_parts
from ..text.messages import check_keywords
from ..text.printing import AbstractPrinted
from .context import Context

CHECK = "slalom.check"
"""The key of a field's check in its metadata: a function of the field's name and value."""


class Part(NamedTuple):
    """A module inside another one: its path, and its view of the step.

    `AbstractWrapper.inner_part` returns the part for the inner transform of a wrapper.

    **Arguments:**

    - `path`: the segments of its path below the outer module, which has none itself.
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

    @classmethod
    def root(
        cls, module: Any, state: Any = None, context: Any = None, params: Params | None = None
    ) -> "Part":
        """A module that is inside no other one."""
        return cls((), module, state, context, params, lambda root: root)

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which operations have the name of this part in profiles."""
        return jax.named_scope("/".join(self.path)) if self.path else contextlib.nullcontext()

    def run(self, write: Any, updates: Any) -> tuple[Any, Any]:
        """Runs this transform, under its name in profiles.

        **Arguments:**

        - `write`: the `Writer` for its updates.
        - `updates`: the incoming updates.

        **Returns:** the result of `write` for the transform's updates, and its new state.
        """
        module = self.module
        self.refuse_parts(updates)
        with self.scope():
            if "updates" not in module.reads_encoded:
                updates = decoded(updates)
            elementwise = "elementwise" in module.reads_encoded
            coded = blockwise(self.state) if elementwise else has_encoded(self.state)
            if "state" not in module.reads_encoded and coded:
                return self._run_decoded(write, updates)
            return module.run(self, write, updates)

    def _run_decoded(self, write: Any, updates: Any) -> tuple[Any, Any]:
        """As `run`, for a transform that expects arrays in its state."""
        # The parts of the transform decode their own states when they run.
        inside = [child.state for child in self.children() if child.state is not None]

        def is_inside(x: Any) -> bool:
            return any(x is state for state in inside)

        here = self._replace(state=decoded(self.state, is_inside))
        result, state = self.module.run(here, write, updates)
        clock = None if self.context is None else self.context.stored_clock
        return result, encoded_again(self.state, state, clock, self.name, is_inside)

    def children(self) -> "tuple[Part, ...]":
        """The direct parts of this one, with their contexts."""
        return self.module.children(self)

    def child(
        self, path: tuple[str, ...], module: Any, get: Callable[[Any], Any], state: Any = None
    ) -> "Part":
        """A part of this one that sees the same context and parameters.

        **Arguments:**

        - `path`: the segments of its path below this part.
        - `module`: a transform, a skip condition or a stateful schedule.
        - `get`: from this part's module to the module.
        - `state`: its state.
        """
        return Part(path, module, state, self.context, self.params, get)

    def cut(self, keep: tuple[bool, ...]) -> "Part":
        """This part on some of its leaves."""
        context = None if self.context is None else self.context.cut(keep, self.params)
        return self._replace(context=context, params=tree.cut(self.params, keep))

    def with_context(self) -> "Part":
        """This part with a context, which is empty if there was none."""
        return self if self.context is not None else self._replace(context=Context())

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

    def children(self, here: Part) -> tuple[Part, ...]:
        """The parts of this module that have hyperparameters, state or a clock.

        Everything that inspects or edits a composition goes through this method: hyperparameters,
        `state_of`, `describe`, `reset`, `rebind`. A part that is not returned here does not exist
        for them.

        **Arguments:**

        - `here`: this module with its state, context and parameters, each `None` if it is not
            known.

        **Returns:** the direct parts by name, each with its own state, context and parameters.
        """
        del here
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
