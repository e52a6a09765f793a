"""Modules that declare their fields: checked when made, printed as the code that makes them."""

import dataclasses

import numpy as np

from .printing import AbstractPrinted

CHECK = "slalom.check"
"""The key of a field's check in its metadata: a function of the field's name and value."""


class AbstractDeclared(AbstractPrinted):
    """The base of transforms, schedules and skip conditions."""

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
