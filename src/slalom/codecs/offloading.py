"""State in the memory of the host."""

import equinox as eqx

from .._core.text.printing import AbstractPrinted


class offload(AbstractPrinted):
    """The memory of the host: state stays there between steps, and moves to the device for each
    step.

    It is not changed, so this is not a codec. To encode it too, store it twice:
    `tx.store("int8").store(sl.codecs.offload("pinned_host"))`.

    **Arguments:**

    - `memory_kind`: the name of the memory, as in `jax.sharding.NamedSharding(...,
        memory_kind="pinned_host")`.
    """

    memory_kind: str = eqx.field(default="pinned_host", static=True)
