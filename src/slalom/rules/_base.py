"""What most rules and recipes consist of, from several files of the core."""

from .._core.protocol.chain import chain as chain
from .._core.protocol.context import Context as Context
from .._core.protocol.rule import AbstractRule as AbstractRule
from .._core.protocol.transform import AbstractTransform as AbstractTransform, State as State
from .._core.text.calls import advise_keywords as advise_keywords
