"""Checkpoints: files in which every array has its name, and that survive being interrupted."""

from ._dict import from_dict as from_dict, to_dict as to_dict
from ._format import DamagedError as DamagedError, NewerVersionError as NewerVersionError
from ._load import header as header, load as load
from ._report import MismatchError as MismatchError
from ._rolling import Rolling as Rolling
from ._save import save as save
from ._saving import Saving as Saving
from ._synthesize import synthesize as synthesize

__all__ = [
    "DamagedError",
    "MismatchError",
    "NewerVersionError",
    "Rolling",
    "Saving",
    "from_dict",
    "header",
    "load",
    "save",
    "synthesize",
    "to_dict",
]


def __dir__() -> list[str]:
    return __all__
