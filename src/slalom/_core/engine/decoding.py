"""How a transform runs that knows nothing of leaves at rest."""

from typing import Any

from jaxtyping import PyTree

from ..protocol.parts import AbstractDeclared, Part
from ..protocol.writer import Writer
from ..state.marks import params_like_fields, with_fields
from .encoded import decoded, encoded_again, has_encoded


def run_decoded(part: Part, write: Writer, updates: PyTree) -> tuple[Any, Any]:
    """The result of a transform that is given decoded leaves, and its new state at rest.

    The state of its parts stays at rest: they are run by `Part.run`, each by itself.
    """
    children = [
        child
        for child in part.module.children(part.state, part.context, part.params)
        if isinstance(child.module, AbstractDeclared) and child.state is not None
    ]
    clock = None if part.context is None else part.context.stored_clock
    run = part.module.run
    if not children:
        result, state = run(write, decoded(updates), decoded(part.state), part.params, part.context)
        return result, encoded_again(part.state, state, clock, part.name)
    own = [] if any(c.state is part.state for c in children) else params_like_fields(part.state)
    old = {n: x for n in own if has_encoded(x := getattr(part.state, n))}
    plain = with_fields(part.state, {n: decoded(x) for n, x in old.items()})
    given = updates if part.module.reads_rest else decoded(updates)
    result, new = run(write, given, plain, part.params, part.context)
    again = {
        n: encoded_again(x, getattr(new, n), clock, f"{part.name}.{n}") for n, x in old.items()
    }
    return result, with_fields(new, again)
