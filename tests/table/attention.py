"""What reads attention logits, around whatever rule comes before. `known` passes them."""

from typing import Any

import slalom as sl

PROJECTIONS = sl.where.leaf(lambda path, x: x.shape == (2, 3))

WRAPPERS: dict[str, Any] = {
    "QKClip": sl.sgd(0.1) | sl.contrib.QKClip(heads=1, where={PROJECTIONS: "q:k"}, layout="oi"),
}
