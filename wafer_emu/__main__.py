"""Entry point: one command line in, one report or document out, one exit code.

Heavy imports wait until they are needed, so that ``--help`` is quick and Ctrl-C during start-up is
answered like any other.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wafer_emu.terminal import Answer, Ui
    from wafer_kernels.errors import WaferError

__all__ = ["main"]

INTERRUPTED = 130


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code.

    Parameters
    ----------
    words
        The command line without the program's name; None: what the program was started with.
    """
    words = sys.argv[1:] if words is None else list(words)
    try:
        code = _main(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        return _give_up_stdout()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(f"error: the result cannot be written: {error}", file=sys.stderr)  # noqa: T201
        return _give_up_stdout()
    return code


def _main(words: list[str]) -> int:
    from wafer_emu.terminal import Ui
    from wafer_kernels.errors import FileError, WaferError

    command: str | None = None
    answer: Answer | None = None
    ui, as_json = Ui("--quiet" in words), "--json" in words
    try:
        with ui, warnings.catch_warnings():
            _show_warnings(ui)
            from wafer_emu.cli import call, command_of

            command = command_of(words)
            answer = call(words, ui)
    except WaferError as error:
        return _fail(ui, as_json, command, error, error.exit_code)
    except KeyboardInterrupt:
        stopped = WaferError("interrupted before the result was there; no file was left half done")
        return _fail(ui, as_json, command, stopped, INTERRUPTED, "KeyboardInterrupt")
    except BrokenPipeError:
        raise
    except OSError as error:
        refused = FileError(f"{error.filename or 'a file'}: {error.strerror or error}")
        return _fail(ui, as_json, command, refused, refused.exit_code)
    except MemoryError:
        full = WaferError("the memory of this computer is full: emulate less, or fewer --frames")
        return _fail(ui, as_json, command, full, full.exit_code, "MemoryError")
    except Exception as error:  # a fault of ours: its trace belongs on stderr
        if not as_json:
            raise
        traceback.print_exc()
        return _fail(ui, as_json, command, WaferError(str(error)), 1, type(error).__name__)
    if answer is not None:
        return _deliver(ui, as_json, command, answer)
    return 0


def _show_warnings(ui: Ui) -> None:
    """Turn Python's warnings for users into one line each."""
    warnings.simplefilter("default", UserWarning)
    warnings.showwarning = lambda message, *_: ui.warn(str(message))


def _deliver(ui: Ui, as_json: bool, command: str | None, answer: Answer) -> int:
    """Print what a command found."""
    if as_json:
        from wafer_emu.document import document, text

        print(text(document(command, answer.result, answer.error)))  # noqa: T201
    elif answer.error is not None:
        ui.fail(answer.error.message)
    else:
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):  # a terminal without Unicode gets question marks
            sys.stdout.reconfigure(errors="replace")
        Console(highlight=False).print(answer.report())
    return answer.error.exit_code if answer.error is not None else 0


def _fail(
    ui: Ui,
    as_json: bool,
    command: str | None,
    error: WaferError,
    code: int,
    kind: str | None = None,
) -> int:
    """Say what went wrong, as a document or in a sentence."""
    if as_json:
        from wafer_emu.document import document, text

        print(text(document(command, error=error, kind=kind)))  # noqa: T201
    else:
        ui.fail(error.message)
    return code


def _give_up_stdout() -> int:
    """Keep Python from writing to a dead stdout once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


if __name__ == "__main__":
    sys.exit(main())
