"""``rewarm``: the command line. One module a command, imported only when that command runs.

A module ``rewarm.cli.NAME`` has one click command or group called ``command``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass

import click

from rewarm import __version__
from rewarm.cli.common import run
from rewarm.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class _Entry:
    summary: str
    """The line in ``rewarm --help``."""
    extra: str = ""
    """The optional dependencies that the command needs: ``pip install 'rewarm[EXTRA]'``."""


_COMMANDS = {
    "bench": _Entry("Measure the storage path here, against its floor and its peers.", extra="trial"),
    "config": _Entry("Show what is configured, and where each value came from."),
    "doctor": _Entry("Check whether this machine fits together."),
    "kv": _Entry("Explain what a server loaded and computed; pin prompts."),
    "lmcache": _Entry("Configure LMCache with its KV on a volume."),
    "trial": _Entry("Prove on a real server whether recovery from flash is faster, and right.", extra="trial"),
    "vllm": _Entry("Configure a vLLM server, and check whether its tier hits."),
    "volume": _Entry("Create, look into, verify, empty, export and import volumes."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name, and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module_name = f"rewarm.cli.{cmd_name}"
        try:
            command = importlib.import_module(module_name).command
        except ModuleNotFoundError as error:
            if error.name == module_name:
                raise UnsupportedError(f"this build of Rewarm has no {cmd_name!r} command") from error
            if error.name is None or error.name.partition(".")[0] == "rewarm" or not entry.extra:
                raise
            raise UnsupportedError(
                f"rewarm {cmd_name} needs the Python package {error.name!r}, which is not installed",
                hint=f"pip install 'rewarm[{entry.extra}]'",
            ) from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            ctx.fail(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name].summary) for name in self.list_commands(ctx)])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 the answer is no, 2 usage, 3 this machine cannot, 4 I/O, 5 damage, 6 busy, "
    "10 our bug, 128+N signal N.",
)
@click.version_option(__version__, "-V", "--version", message="rewarm %(version)s")
def cli() -> None:
    """Give a model server back, fast and verified, what it already computed once."""


def main() -> None:
    """Entry point of the ``rewarm`` script; a shell asks it for completions through _REWARM_COMPLETE."""
    asked = os.environ.get("_REWARM_COMPLETE")
    if asked:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "rewarm", "_REWARM_COMPLETE", asked))
    sys.exit(run(cli))


if __name__ == "__main__":
    main()
