"""Checkpoints: files in which every array has its name, and that survive being interrupted."""

from ._format import DamagedError as DamagedError, NewerVersionError as NewerVersionError
from ._load import from_dict as from_dict, header as header, load as load, synthesize as synthesize
from ._match import MismatchError as MismatchError
from ._rolling import Rolling as Rolling
from ._save import Saving as Saving, save as save, to_dict as to_dict
