"""``rewarm volume add-root`` and ``remove-root``: other directories for a volume that servers use meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

import click

from rewarm.cli.common import json_option, note, print_json, quiet_option
from rewarm.errors import UsageError
from rewarm.units import format_size, parse_size
from rewarm.volume.layout import RootPaths
from rewarm.volume.members import add_root, remove_root

_roots = click.argument("roots", nargs=-1, required=True, metavar="DIR...")


@click.command("add-root")
@_roots
@click.option("--new", required=True, metavar="DIR", help="Empty, missing with a parent, or one that was removed.")
@click.option("--size", metavar="SIZE", help="What it may hold, on top of the others; not for one that was removed.")
@json_option
@quiet_option
def add(roots: Sequence[str], new: str, size: str | None, as_json: bool) -> None:
    """Add a directory to the volume that lies in DIR..., on another device; servers use it within seconds."""
    if size is None and not os.path.lexists(RootPaths(new).volume_file):
        raise UsageError(f"nothing says how much {new} may hold", hint="give --size, like 200GiB")
    made = add_root(roots, new, capacity_bytes=0 if size is None else parse_size(size))
    path = os.path.realpath(new)
    if as_json:
        document = {"path": path, "root_id": made.root_id, "capacity_bytes": made.capacity_bytes}
        print_json({"schema": "rewarm.volume.add-root/1", **document})
    else:
        click.echo(f"{path}  {format_size(made.capacity_bytes)}")
    note("servers that start from now on: name it too, so that they find it whatever becomes of the other directories")


@click.command("remove-root")
@_roots
@click.option("--old", required=True, metavar="DIR", help="A directory of the volume, or its root_id where it is gone.")
@json_option
@quiet_option
def remove(roots: Sequence[str], old: str, as_json: bool) -> None:
    """Take a directory out of a volume; what lies there is a miss within seconds, and nothing is moved or removed."""
    removed = remove_root(roots, old)
    if as_json:
        print_json({"schema": "rewarm.volume.remove-root/1", **asdict(removed)})
    else:
        click.echo(f"{removed.path}  removed from the volume")
    note("its records are left where they are: add-root takes them back; to free the room, remove the directory")
