"""Declarations of the fields of transforms, schedules and states.

The fields of a transform are numbers that may be traced and scheduled (`hyperparameter`), or
structure (`count_field`, `choice_field`, `dtype_field`, `layout_field`, and
`eqx.field(static=True)` for the rest).
The fields of a state are marked with what they belong to (`param_like`, `per_param`, `per_leaf`,
`until_reset`). A field without a mark is saved and replicated.
"""

from ._core.fields.declare import (
    Number as Number,
    OptionalNumber as OptionalNumber,
    choice_field as choice_field,
    count_field as count_field,
    dtype_field as dtype_field,
    hyperparameter as hyperparameter,
    layout_field as layout_field,
)
from ._core.state.marks import (
    param_like as param_like,
    per_leaf as per_leaf,
    per_param as per_param,
    until_reset as until_reset,
)
