"""What every command shares: options, output, progress, and the way from an exception to an exit code.

Data goes to stdout, all else to stderr. A command is a function that parses, calls the library, prints, and returns an
ExitCode (or None for DONE); it raises the library's errors as they are. ``run`` turns them into lines and codes.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click

from rewarm.errors import ExitCode, RewarmError, StorageError, UsageError, shortened

F = TypeVar("F", bound=Callable[..., Any])

_QUIET = "rewarm.quiet"
_STREAM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2 and later


def json_option(command: F) -> F:
    """``--json``: the command gets ``as_json`` and prints one JSON document on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(command)


def quiet_option(command: F) -> F:
    """``--quiet``: no progress and no notes; errors still show."""

    def remember(context: click.Context, _option: click.Parameter, quiet: bool) -> None:
        context.meta[_QUIET] = quiet

    option = click.option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=remember, help="No progress and no notes."
    )
    return option(command)


def is_quiet() -> bool:
    """Whether the running command was called with ``--quiet``."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


def print_json(document: Any) -> None:
    """One JSON document on stdout, keys as given; ASCII, so that every locale and every file name can be printed."""
    click.echo(json.dumps(document, indent=2))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on stdout; a column whose cells all begin with a digit is set to the right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def note(text: str) -> None:
    """One line for a person on stderr, dropped by ``--quiet``."""
    if not is_quiet():
        _say(text)


def check_between(option: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Refuse a number that is none, or outside of its bounds.

    Raises:
        UsageError: It is.
    """
    if not low <= value <= high:  # of a number that is none, nothing holds
        raise UsageError(f"{option} is {value:g}", hint=f"{low:g} to {high:g}{f' {unit}' if unit else ''}")


@contextmanager
def progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on stderr, only where that is a terminal; yields ``advance(n)``.

    Args:
        what: A few words before the bar.
        total: Sum of all n that will be passed to ``advance``.
        in_bytes: The numbers are bytes and print as sizes with a rate.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda _n: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    if in_bytes:
        columns += [bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn()]
    else:
        columns += [bars.MofNCompleteColumn()]
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


def print_error(message: str, hint: str = "") -> None:
    """``error: ...`` and, where there is one, ``hint: ...``, each one line on stderr."""
    _say(shortened(message), f"{click.style('error', fg='red', bold=True)}: ")
    if hint:
        _say(shortened(hint), f"{click.style('hint', fg='cyan', bold=True)}: ")


def _say(text: str, before: str = "") -> None:
    """One line on stderr, whatever file names are in it; where nothing can be said, nothing else fails for it."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    with suppress(OSError):
        click.echo(before + line, err=True)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every exception ends here as a line on stderr."""
    color = False if os.environ.get("NO_COLOR") else None
    _complete_streams()
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with command.make_context("rewarm", words, color=color) as context:
            result = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        return left.exit_code
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is becomes a line and a code
        return _report(error)
    return int(result) if isinstance(result, int) else ExitCode.DONE


def _complete_streams() -> None:
    """Make each of the three standard streams exist, so that no file of ours gets its number.

    A closed stdin or stdout fails when it is used, as a full disk does; what goes to a closed stderr is dropped.
    """
    for name, number, flags in (("stdin", 0, os.O_WRONLY), ("stdout", 1, os.O_RDONLY), ("stderr", 2, os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may be no text


def _drop_output() -> None:
    """What is still buffered for a stdout that takes no more must not raise again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _access_hint(path: str, number: int | None) -> str:
    from rewarm.volume.access import access_hint  # brings the engine with it, which --help does not need

    return access_hint(path, number or 0)


def _report(error: Exception) -> int:
    if isinstance(error, RewarmError):
        hint = _access_hint(error.path, error.errno) if isinstance(error, StorageError) and not error.hint else ""
        print_error(error.message, error.hint or hint)
        return error.exit_code
    if isinstance(error, _NO_ARGUMENTS):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        print_error(error.format_message(), f"{context.command_path} --help" if context else "")
        return ExitCode.USAGE
    if isinstance(error, OSError) and error.filename is not None:
        path = os.fsdecode(error.filename)
        print_error(f"{error.strerror}: {path}", _access_hint(path, error.errno))
        return ExitCode.IO
    if isinstance(error, OSError) and error.errno in _STREAM_ERRORS:
        with suppress(OSError, ValueError):
            _drop_output()
        print_error(f"a standard stream or a file cannot be used: {error.strerror}")
        return ExitCode.IO
    traceback.print_exception(error)
    print_error(
        f"unexpected {type(error).__name__}: {error}",
        "this is a bug in Rewarm: please report it with the lines above and the output of rewarm doctor --json "
        "(CONTRIBUTING.md, Reporting a bug)",
    )
    return ExitCode.BUG
