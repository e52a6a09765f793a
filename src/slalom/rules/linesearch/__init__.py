"""Line searches."""

from .backtracking import (
    ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
    ScaleByBacktrackingLinesearchState as ScaleByBacktrackingLinesearchState,
)
from .zoom import (
    ScaleByZoomLinesearch as ScaleByZoomLinesearch,
    ScaleByZoomLinesearchState as ScaleByZoomLinesearchState,
)
