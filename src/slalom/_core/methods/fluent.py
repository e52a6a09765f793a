"""The methods that wrap a transform, such as `.mask` and `.every_k`.

A method and the class that it returns share a name: `.every_k` returns a `wrappers.EveryK`. The
method has the signature and describes the arguments, for editors and type checkers; the class
describes what it computes. A test compares the two signatures.
"""

from typing import TYPE_CHECKING, Any, NoReturn, cast

from ...tree.paths import snake_case
from ..text.messages import PACKAGE, library
from ..text.printing import constructor_call, method_call
from .gradients import AbstractGradientMethods
from .parameters import AbstractParameterMethods
from .scope import AbstractScopeMethods

if TYPE_CHECKING:
    import slalom

# The one circle of the library closes here, when a method is called, and not when it is imported.
# Every transform has these methods, and each method needs the class that it returns, which is a
# transform. So the methods find their classes in `library` when they are called. (The arithmetic of
# schedules in `schedule.py` does the same.) Two import a function, which
# `tests/core/test_import_graph.py` allows in no other file.

# Every `self` here is an `AbstractTransform`, which is the only subclass of this class.
# pyright: reportArgumentType=false


class AbstractFluent(AbstractScopeMethods, AbstractGradientMethods, AbstractParameterMethods):
    """The methods of every transform that make a chain or a wrapper of it."""

    def _code(self) -> object:
        # The wrappers of the library print as calls of the methods that make them.
        cls = type(self)
        is_ours = cls.__module__.startswith(f"{PACKAGE}.wrappers.")
        method = getattr(AbstractFluent, snake_case(cls.__name__), None) if is_ours else None
        if method is None:
            return constructor_call(self)
        return method_call(self, cast(Any, self).inner, method)

    def __or__(self, other: "slalom.AbstractTransform") -> "slalom.AbstractTransform":
        """This transform, followed by another one."""
        return library.Chain.join(self, other)

    def __ror__(self, other: object) -> "slalom.AbstractTransform":
        # `other` is not a transform. The chain raises an error that names it.
        return library.Chain.join(other, self)

    if not TYPE_CHECKING:  # to a type checker it would mean that they can be added

        def __add__(self, other: object) -> Any:
            raise TypeError("Transforms are not added. Join them with `|`: `sl.Clip(1.0) | tx`.")

        def __mul__(self, other: object) -> Any:
            raise TypeError(
                "Transforms are not multiplied. Scale the updates: `tx | sl.Scale(0.5)`."
            )

        def __neg__(self) -> NoReturn:
            raise TypeError(
                "Transforms are not negated. To ascend the loss, write `tx.maximize()`."
            )

        __radd__ = __sub__ = __rsub__ = __add__
        __rmul__ = __truediv__ = __mul__


FLUENT = frozenset(
    name for cls in AbstractFluent.__mro__[:4] for name in vars(cls) if name[0] != "_"
)
"""The names that fields of transforms must not have."""
