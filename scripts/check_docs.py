"""Check the Markdown pages: links resolve, commands exist, nothing names one machine.

A link may point to a file of the repository, to a heading of a page (by GitHub's rules), or to a public https page,
which is not fetched. Every `rewarm` command in code must name a command and options that exist; every `make TARGET`
must be a target. No text file of the repository, page or not, names a path that only one machine has.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from rewarm.cli.main import cli
from rewarm.errors import RewarmError

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\$\(|\$ |`|&& |; |\| )(rewarm(?: [^`#|;&)]*)?)")
MAKE = re.compile(r"(?:^|`|\$ )make ([a-z][a-z-]*)\b")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
ONE_MACHINE = re.compile(r"(?:^|[^A-Za-z0-9_./-])/(?:work|root|home/[a-z]+|tmp/[a-z]{2,3})(?=[/\s\"'`])", re.MULTILINE)


def main() -> int:
    """Exit code 1 when something is wrong; each on a line of its own."""
    pages = sorted(ROOT / name for name in tracked_files() if name.endswith(".md"))
    wrong = [f"{page.relative_to(ROOT)}: {problem}" for page in pages for problem in problems_of(page)]
    wrong += machine_paths()
    print("\n".join(wrong) or f"{len(pages)} pages: links, commands and paths are right")
    return 1 if wrong else 0


def tracked_files() -> list[str]:
    """All files that are, or would be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return [name for name in names if (ROOT / name).exists()]


def problems_of(page: Path) -> Iterator[str]:
    """What is wrong with one page."""
    text = page.read_text(encoding="utf-8")
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        yield from _link_problems(page, match.group(1))
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    for block in _code_of(text):
        for line in block.replace("\\\n", " ").splitlines():
            for target in MAKE.findall(line.strip()):
                if target not in targets:
                    yield f"no such target: make {target}"
            for command in COMMAND.findall(line.strip()):
                yield from _command_problems(command)


def machine_paths() -> Iterator[str]:
    """Places in text files that name a path of one machine."""
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for match in ONE_MACHINE.finditer(text):
            line = text.count("\n", 0, match.end()) + 1
            yield f"{name}:{line}: names a path of one machine: {match.group(0).strip()}"


def _code_of(text: str) -> list[str]:
    return FENCE.findall(text) + re.findall(r"`((?:rewarm|make) [^`\n]+)`", FENCE.sub("", text))


def _link_problems(page: Path, target: str) -> Iterator[str]:
    if target.startswith(("https://", "mailto:")):
        return
    if target.startswith("http://"):
        yield f"not https: {target}"
        return
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        yield f"no such file: {target}"
    elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
        yield f"no such heading: {target}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _command_problems(text: str) -> Iterator[str]:
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        words = text.split()[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="rewarm")
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        word = words.pop(0)
        if "|" in word or word in {"...", "X", "COMMAND"}:
            return
        try:
            found = command.get_command(context, word)
        except RewarmError as error:
            yield f"{text.strip()!r}: {error.message}"
            return
        if found is None:
            yield f"no such command: {text.strip()!r}"
            return
        command = found
    known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in known | {"--help", "--version"}:
            yield f"no such option {name}: {text.strip()!r}"


if __name__ == "__main__":
    sys.exit(main())
