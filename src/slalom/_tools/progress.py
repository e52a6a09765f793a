"""A progress bar, where tqdm is installed."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    total: int, progress: bool | None, description: str
) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar. Yields a function that advances it by one step, with a note.

    **Arguments:**

    - `total`: the number of steps.
    - `progress`: whether to show it. `None` shows it in a terminal, if tqdm is installed.
    - `description`: what is in progress.
    """
    wanted = sys.stderr.isatty() if progress is None else progress
    if not wanted:
        yield lambda note: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress:
            raise ImportError("`progress=True` needs tqdm: pip install tqdm.") from error
        yield lambda note: None
        return
    with tqdm(total=total, desc=description, unit="step") as bar:

        def advance(note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update()

        yield advance
