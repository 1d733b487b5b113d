"""The command line: which commands there are, and how one is found and called."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnusedCliTokensError

from wafer_emu import cli_check, cli_kernels, cli_run, cli_show, cli_validate
from wafer_emu.cli_demo import demo
from wafer_emu.terminal import Answer, Ui
from wafer_kernels.errors import UsageError

__all__ = ["call", "command_of"]


def _version() -> str:
    from importlib.metadata import version  # slow to import

    return version("wafer-emu")


app = App(
    name="wafer-emu",
    help="Emulate LLM prefill on wafer-scale chips, tile by tile.",
    version=_version,
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_on_error=False,
)
app.command(demo)
app.command(cli_run.run)
app.command(cli_run.compare)
app.command(cli_run.max_length)
app.command(cli_kernels.tile)
app.command(cli_kernels.gemm)
app.command(cli_kernels.collective)
app.command(cli_show.show)
app.command(cli_run.report)
app.command(cli_validate.validate)
app.command(cli_check.check)


def command_of(words: Sequence[str]) -> str | None:
    """Name of the command that a command line calls, None if it calls none."""
    first = words[0] if words else ""
    return first if not first.startswith("-") and first in app else None


def call(words: Sequence[str], ui: Ui) -> Answer | None:
    """Carry out a command line; None where it only asked for help or version.

    Raises
    ------
    UsageError
        If it is no command line of this program.
    WaferError
        Whatever the command raises.
    """
    _, groups, rest = app.parse_commands(words)
    named = any(not word.startswith("-") for word in rest)
    asked_for_help = {"--help", "-h", "--version"} & set(rest)
    if groups[-1].default_command is None and not named and not asked_for_help:
        names = [name for name in groups[-1] if not name.startswith("-")]
        raise UsageError(f"which command? There are {', '.join(names)}; --help tells more")
    try:
        command, bound, ignored = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(_sentence(error)) from error
    if "ui" in ignored:
        bound.arguments["ui"] = ui
    answer: Answer | None = command(*bound.args, **bound.kwargs)
    return answer


def _sentence(error: CycloptsError) -> str:
    """What was wrong with the command line, in one line."""
    match error:
        case MissingArgumentError(argument=argument) if argument is not None:
            return f"{' '.join(error.command_chain or ())} needs {argument.name} and a value for it"
        case UnusedCliTokensError():
            return f"no use for {' '.join(error.unused_tokens or ())}: --help shows the options"
    return " ".join(str(error).split())
