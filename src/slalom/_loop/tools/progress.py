"""A progress bar, where tqdm is installed."""

import contextlib
import sys
from collections.abc import Callable, Iterator


def shows_progress(progress: bool | None) -> bool:
    """Whether to show a progress bar. `None` shows it in a terminal."""
    return sys.stderr.isatty() if progress is None else progress


@contextlib.contextmanager
def progress_bar(
    total: int, progress: bool | None, description: str
) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar. Yields a function that sets a note and advances by a number of steps.

    **Arguments:**

    - `total`: the number of steps.
    - `progress`: whether to show it. `None` shows it in a terminal, if tqdm is installed.
    - `description`: what is in progress.
    """
    if not shows_progress(progress):
        yield lambda note, steps: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress:
            raise ImportError("`progress=True` needs tqdm: pip install tqdm.") from error
        yield lambda note, steps: None
        return
    with tqdm(total=total, desc=description, unit="step") as bar:

        def advance(note: str, steps: int) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(steps)

        yield advance
