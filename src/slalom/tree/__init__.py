"""Tree arithmetic for rules, and the one place where dtypes are decided.

Missing leaves are `None`, which `jax.tree.map` skips. The names in `__all__` are for authors of
transforms; the others are for the library.
"""

from .dtypes import (
    accumulation_dtype as accumulation_dtype,
    as_canonical as as_canonical,
    as_float as as_float,
    canonical as canonical,
    canonical_float as canonical_float,
    cast as cast,
    cast_like as cast_like,
    is_array as is_array,
    is_inexact as is_inexact,
    is_key as is_key,
    real_dtype as real_dtype,
    storage_dtype as storage_dtype,
    sum_dtype as sum_dtype,
    widened as widened,
)
from .fresh import (
    copy as copy,
    first_moment as first_moment,
    fresh_count as fresh_count,
    no_state as no_state,
    second_moment as second_moment,
    stacked_zeros as stacked_zeros,
    zeros_like as zeros_like,
    zeros_of as zeros_of,
    zeros_of_sums as zeros_of_sums,
)
from .leaves import (
    add as add,
    cut as cut,
    map_leaves as map_leaves,
    merge as merge,
    put as put,
    scale as scale,
)
from .moments import (
    bias_correction as bias_correction,
    increment as increment,
    moved as moved,
    newest_weight as newest_weight,
    running_maximum as running_maximum,
)
from .norms import (
    NormOf as NormOf,
    SumOfSquares as SumOfSquares,
    global_norm as global_norm,
    gram_matrix as gram_matrix,
    norm as norm,
    norm_of_all as norm_of_all,
    norm_of_stored as norm_of_stored,
    norms_along as norms_along,
    norms_of as norms_of,
    rms as rms,
    scaled_square as scaled_square,
    squarable as squarable,
    squared_norm as squared_norm,
)
from .paths import (
    check_inexact as check_inexact,
    check_same_shapes as check_same_shapes,
    check_same_structure as check_same_structure,
    dotted as dotted,
    leaf_paths as leaf_paths,
)
from .sharding import canonical_spec as canonical_spec
from .squares import (
    abs_squared as abs_squared,
    bounded as bounded,
    bounded_entries as bounded_entries,
    bounded_square as bounded_square,
    divided as divided,
    inverse_root as inverse_root,
    positive as positive,
    quotient as quotient,
    root as root,
    sign as sign,
)
from .sums import (
    all_finite as all_finite,
    inner as inner,
    matmul as matmul,
    sum_of as sum_of,
)
from .tracing import (
    after as after,
    false_after as false_after,
    once_known as once_known,
    while_loop as while_loop,
)

__all__ = [
    "NormOf",
    "abs_squared",
    "accumulation_dtype",
    "all_finite",
    "bias_correction",
    "bounded_square",
    "cast_like",
    "copy",
    "first_moment",
    "fresh_count",
    "global_norm",
    "increment",
    "inner",
    "map_leaves",
    "newest_weight",
    "no_state",
    "positive",
    "second_moment",
    "widened",
    "zeros_like",
]
