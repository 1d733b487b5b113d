"""What a command hands back, and what is said on stderr while it works."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from wafer_kernels.errors import WaferError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

__all__ = ["Answer", "Ui"]

LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes
    ----------
    result
        The ``result`` of the JSON document.
    report
        Makes the same for people; called only if it is printed.
    error
        Why the command counts as failed although it has a result.
    """

    result: Mapping[str, Any]
    report: Callable[[], RenderableType]
    error: WaferError | None = None


class Ui:
    """Progress, warnings and errors on stderr; stdout belongs to the result.

    On a terminal progress is a bar that vanishes; elsewhere one line about every ten seconds;
    nothing if quiet.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self, doing: str, fraction: float) -> None:
        """Show what is being done and which fraction of it is (0 to 1)."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(doing, fraction)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            self._say(f"[{self._logged - self._started:.0f} s] {doing} {100 * fraction:.0f} %")

    def warn(self, sentence: str) -> None:
        """Say what the user should know, unless quiet."""
        if not self._quiet:
            self._say(f"warning: {sentence}")

    def fail(self, sentence: str) -> None:
        """Say what went wrong."""
        self._say(f"error: {sentence}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _draw(self, doing: str, fraction: float) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), Elapsed()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(doing, total=1.0)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, description=doing, completed=fraction)
