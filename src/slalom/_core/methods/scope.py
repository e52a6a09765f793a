"""Methods that change where a transform acts, and how its state and its parameters are kept."""

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ...tree.types import WhereLike
from ..protocol.parts import AbstractDeclared
from ..text.calls import advise_methods
from ..text.messages import library

if TYPE_CHECKING:
    import slalom

# Every `self` here is an `AbstractTransform`: see `fluent.py`.
# pyright: reportArgumentType=false


@advise_methods
class AbstractScopeMethods(AbstractDeclared):
    """Methods that change where a transform acts, and how its state and its parameters are kept."""

    def mask(self, where: WhereLike) -> "slalom.wrappers.Mask":
        """Applies this transform to the selected leaves; the others pass through unchanged.

        Use it for links of a chain. For a whole optimizer, use `.only`: leaves that pass through
        would receive raw gradients as updates.

        **Arguments:**

        - `where`: a selector, a function of the parameters that returns a tree of bools, or such a
            tree.

        **Returns:** a transform.
        """
        return library.wrappers.Mask(self, where)

    def only(self, where: WhereLike) -> "slalom.wrappers.Only":
        """Applies this transform to the selected leaves; the others are not updated.

        **Arguments:**

        - `where`: as for `mask`.

        **Returns:** a transform.
        """
        return library.wrappers.Only(self, where)

    def partition(
        self,
        others: Mapping[WhereLike, "slalom.AbstractTransform"],
        names: tuple[Hashable, ...] | None = None,
    ) -> "slalom.wrappers.Partition":
        """Applies other transforms to some leaves, and this one to the rest.

        **Arguments:**

        - `others`: a mapping from selectors (or functions of the parameters) to transforms. If
            several selectors match a leaf, the first one is used.
        - `names`: a name for each of the `others`, which appears in paths. Defaults to their
            positions.

        **Returns:** a transform.
        """
        return library.wrappers.Partition.by_cases(self, others, names)

    def maximize(self) -> "slalom.wrappers.Maximize":
        """Maximizes the loss with this transform, which would otherwise descend.

        **Returns:** a transform, for a whole model or for some of its parameters.
        """
        return library.wrappers.Maximize(self)

    def flatten(self, max_size: int = 8192) -> "slalom.wrappers.Flatten":
        """Applies this transform to all small leaves at once, concatenated into buffers.

        **Arguments:**

        - `max_size`: the size of the largest leaves that are concatenated, an int ≥ 1.

        **Returns:** a transform.
        """
        return library.wrappers.Flatten(self, max_size)

    def split_complex(self) -> "slalom.wrappers.SplitComplex":
        """Applies this transform to the real and imaginary parts of complex leaves.

        **Returns:** a transform.
        """
        return library.wrappers.SplitComplex(self)

    def store(
        self, codec: Any, where: WhereLike | None = None, *, min_size: int = 4096
    ) -> "slalom.wrappers.Store":
        """Stores the state of this transform in fewer bits.

        **Arguments:**

        - `codec`: `"bfloat16"`, `"float16"`, `"float8_e4m3fn"`, `"int8"`, `"dynamic8"`, `"int4"`,
            or a codec of `sl.codecs`; or a mapping from fields of the state to them. A field is
            named by its path, such as `"scale_by_adam.mu"`, a suffix of it, or a glob.
        - `where`: the parameters whose state is encoded: a selector, a function or a tree of
            bools. Defaults to all.
        - `min_size`: the smallest number of entries of a leaf that is encoded, an int ≥ 1.

        **Returns:** a transform.
        """
        return library.wrappers.Store(self, codec, where, min_size=min_size)

    def write(
        self,
        policy: Literal["master", "kahan", "ecc", "stochastic", "nearest"],
        key: Any = 0,
    ) -> "slalom.wrappers.Write":
        """Writes half-precision parameters so that small updates are not rounded away.

        **Arguments:**

        - `policy`: the way to keep small updates: `"master"`, a float32 copy of the parameters;
            `"kahan"`, a compensation in the parameter's dtype; `"ecc"`, eight more bits;
            `"stochastic"`, rounding at random; or `"nearest"`, nothing.
        - `key`: the key of the random rounding, an int in [0, 2³¹) or a PRNG key.

        **Returns:** a transform, which must be the last link of a chain.
        """
        return library.wrappers.Write(self, policy, key)

    def drive(self, schedules: Mapping[str, Any]) -> "slalom.wrappers.Drive":
        """Sets hyperparameters of this transform by stateful schedules.

        **Arguments:**

        - `schedules`: a mapping from hyperparameters to stateful schedules such as
            `sl.schedules.ReduceOnPlateau`. A hyperparameter is named by its path inside this
            transform, any unambiguous suffix of it, such as `"learning_rate"`, or a glob.

        **Returns:** a transform.
        """
        return library.wrappers.Drive(self, schedules)

    def record(self) -> "slalom.wrappers.Record":
        """Reports norms and the hyperparameters in use in `opt.metrics`.

        **Returns:** a transform.
        """
        return library.wrappers.Record(self)
