"""``rewarm volume``: create, look into, verify, empty, export and import volumes."""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import click

from rewarm.cli import volume_quota, volume_roots, volume_top
from rewarm.cli.common import json_option, note, print_json, print_table, progress, quiet_option
from rewarm.config import KvConfig, resolve
from rewarm.errors import ExitCode, StorageError, UsageError
from rewarm.units import MIB, format_size, parse_size
from rewarm.volume import create_volume
from rewarm.volume.archive import Exported, export_archive, import_archive
from rewarm.volume.evict import Evicted, choose, evict_until, purge
from rewarm.volume.host_tier import host_tier_info
from rewarm.volume.info import (
    MANY_RECORDS,
    NamespaceInfo,
    RootInfo,
    VolumeInfo,
    flatten,
    root_info,
    volume_info,
)
from rewarm.volume.layout import read_roots
from rewarm.volume.members import members_of
from rewarm.volume.pins import pin_names, pins_of
from rewarm.volume.verify import Problem, verify_volume

_UNLOCKED_S = 60.0
"""A partial archive this old that nobody holds was left by a killed export; a younger one may not be locked yet."""

_SHORT = 12
"""Hexadecimal digits of an id that are shown."""
_SHOWN_PROBLEMS = 20
_SMALL_CHUNK_BYTES = 4 * MIB


@click.group("volume")
def command() -> None:
    """Create, look into, watch, verify, empty, export and import volumes."""


command.add_command(volume_quota.command)
command.add_command(volume_roots.add)
command.add_command(volume_roots.remove)
command.add_command(volume_top.command)

_roots = click.argument("roots", nargs=-1, required=True, metavar="DIR...")


@command.command("create")
@_roots
@click.option("--size", required=True, metavar="SIZE", help="What the volume may hold, like 200GiB, over all DIRs.")
@json_option
@quiet_option
def create(roots: Sequence[str], size: str, as_json: bool) -> None:
    """Make a volume of one or more directories, one a device.

    Each DIR is empty, or missing with a parent that is there. The size is spread by the free space of their devices.
    """
    made = create_volume(roots, capacity_bytes=parse_size(size))
    if as_json:
        shares = [{"path": path, "capacity_bytes": root.capacity_bytes} for path, root in made.roots.items()]
        print_json({"schema": "rewarm.volume.create/1", "volume_id": made.volume_id, "roots": shares})
    else:
        for path, root in made.roots.items():
            click.echo(f"{path}  {format_size(root.capacity_bytes)}")
    if made.capacity_bytes > MANY_RECORDS * _SMALL_CHUNK_BYTES:
        note(
            f"note: in chunks of {format_size(_SMALL_CHUNK_BYTES)} this holds more than {MANY_RECORDS:,} records; "
            "larger chunks open faster (kv.chunk_tokens)"
        )


@command.command("info")
@_roots
@click.option("--dwpd", type=float, metavar="N", help="Drive writes a day that the flash is rated for. [kv.dwpd]")
@json_option
@quiet_option
def info(roots: Sequence[str], dwpd: float | None, as_json: bool) -> None:
    """Show the roots, the room, the wear and the namespaces of a volume; reads names only."""
    configured = resolve(KvConfig, arguments={"dwpd": dwpd}).config
    rated_dwpd = configured.dwpd
    found = volume_info(roots)
    tier = host_tier_info(found.id, configured.host_root)
    if as_json:
        document = _info_document(found, rated_dwpd)
        print_json({**document, "host_tier": None if tier is None else _root_document(tier, 0.0)})
    else:
        _print_info(found)
        _print_wear(found.roots, rated_dwpd)
        _print_namespaces(found.namespaces)
    _note_roots(found)
    if tier is not None:
        used, capacity = format_size(tier.usage.used_bytes), format_size(tier.file.capacity_bytes)
        note(f"note: its host tier on this machine is {tier.path}: {used} of {capacity} used")
    if found.num_records > MANY_RECORDS:
        note(
            f"note: {found.num_records:,} records are more than {MANY_RECORDS:,}; larger chunks need less memory "
            "and open faster (kv.chunk_tokens)"
        )


def _note_roots(found: VolumeInfo) -> None:
    """Where others were named than the volume has."""
    shown = {root.file.root_id: root.path for root in found.roots}
    for member in members_of(list(shown.values())).values():
        if member.is_member and member.root_id not in shown:
            note(f"note: {member.path} is a root of this volume too")
        elif not member.is_member and member.root_id in shown:
            note(f"note: {shown[member.root_id]} was removed from this volume")


def _info_document(found: VolumeInfo, rated_dwpd: float) -> dict[str, Any]:
    return {
        "schema": "rewarm.volume.info/1",
        "volume_id": found.id,
        "format_version": found.version,
        "capacity_bytes": found.capacity_bytes,
        "used_bytes": found.used_bytes,
        "records": found.num_records,
        "index_bytes": found.index_bytes,
        "scan_seconds": round(found.scan_s, 6),
        "roots": [_root_document(root, rated_dwpd) for root in found.roots],
        "namespaces": [
            {
                "id": namespace.id.hex(),
                "payload_bytes": namespace.payload_bytes,
                "records": namespace.num_records,
                "bytes": namespace.num_bytes,
                "identity": namespace.identity,
                "trouble": namespace.trouble,
            }
            for namespace in found.namespaces
        ],
    }


def _root_document(root: RootInfo, rated_dwpd: float) -> dict[str, Any]:
    now_s = time.time()
    written_day = root.written_day_bytes(now_s)
    return {
        "path": root.path,
        "root_id": root.file.root_id,
        "created_ns": root.file.created_ns,
        "capacity_bytes": root.file.capacity_bytes,
        "used_bytes": root.usage.used_bytes,
        "used_is_known": root.usage.is_known,
        "stored_bytes_total": root.usage.reserved_bytes,
        "evicted_records_total": root.usage.evicted_records,
        "evicted_bytes_total": root.usage.evicted_bytes,
        "quarantined_bytes": root.quarantined_bytes,
        "disk_free_bytes": root.disk_free_bytes,
        "pids": root.pids,
        "janitor_pid": root.janitor_pid,
        "device_bytes": root.device_bytes,
        "written_bytes_total": root.wear.total_bytes,
        "written_bytes_last_day": written_day,
        "written_bytes_per_day_mean": round(root.wear.mean_per_day(now_s)),
        "dwpd": round(written_day / root.device_bytes, 6),
        "rated_dwpd": rated_dwpd or None,
    }


def _print_info(found: VolumeInfo) -> None:
    share = found.used_bytes / found.capacity_bytes
    click.echo(f"volume {found.id}, format {found.version}")
    click.echo(f"used {format_size(found.used_bytes)} of {format_size(found.capacity_bytes)} ({share:.1%})")
    click.echo(
        f"records {found.num_records:,}, index {format_size(found.index_bytes)} a process, "
        f"scan {found.scan_s:.2f} s at open"
    )
    click.echo()
    rows = [
        (
            root.path,
            format_size(root.file.capacity_bytes),
            format_size(root.usage.used_bytes) if root.usage.is_known else "not counted yet",
            format_size(root.disk_free_bytes),
            ", ".join(map(str, root.pids)) or "-",
        )
        for root in found.roots
    ]
    print_table(("root", "capacity", "used", "disk free", "processes"), rows)


def _print_wear(roots: Sequence[RootInfo], rated_dwpd: float) -> None:
    now_s = time.time()
    rows = []
    for root in roots:
        day, mean = root.written_day_bytes(now_s), round(root.wear.mean_per_day(now_s))
        share = (f"{mean / root.device_bytes / rated_dwpd:.1%}",) if rated_dwpd else ()
        drive_writes = f"{mean / root.device_bytes:.3g}"
        rows.append(
            (root.path, format_size(root.wear.total_bytes), format_size(day), format_size(mean), drive_writes, *share)
        )
    click.echo()
    of_rated = (f"of {rated_dwpd:g} rated",) if rated_dwpd else ()
    print_table(("root", "written", "last day", "a day, mean", "drive writes a day", *of_rated), rows)


def _print_namespaces(namespaces: Sequence[NamespaceInfo]) -> None:
    """What all namespaces share once, and below each what is its own."""
    flat = {namespace.id: flatten(namespace.identity) for namespace in namespaces if not namespace.trouble}
    shared = dict(set.intersection(*(set(values.items()) for values in flat.values()))) if len(flat) > 1 else {}
    for namespace in namespaces:
        size = format_size(namespace.payload_bytes) if namespace.payload_bytes else "unknown size"
        click.echo()
        click.echo(
            f"namespace {namespace.id.hex()[:_SHORT]}: {namespace.num_records:,} records of {size}, "
            f"{format_size(namespace.num_bytes)}"
        )
        if namespace.trouble:
            click.echo(f"  {namespace.trouble}")
        _print_values({k: v for k, v in flat.get(namespace.id, {}).items() if k not in shared})
    if shared:
        click.echo("\nall of them:")
        _print_values(shared)


def _print_values(values: dict[str, str]) -> None:
    width = max(map(len, values), default=0)
    for name in sorted(values):
        click.echo(f"  {name:<{width}}  {values[name]}")


@command.command("verify")
@_roots
@click.option("--repair", is_flag=True, help="Remove what is damaged.")
@json_option
@quiet_option
def verify(roots: Sequence[str], repair: bool, as_json: bool) -> ExitCode:
    """Read every record and check it. Exit code 5 when damage was found, 4 when only something could not be read."""
    with progress("verify", _count_records(roots)) as advance:
        report = verify_volume(roots, repair=repair, advance=advance)
    if as_json:
        print_json({"schema": "rewarm.volume.verify/1", **dataclasses.asdict(report)})
    else:
        click.echo(f"{report.num_records:,} records read, {format_size(report.num_bytes)} whole")
        _print_problems("damaged", report.damaged)
        _print_problems("cannot be read", report.unreadable)
        _print_problems("skipped", report.skipped)
    if report.damaged:
        return ExitCode.DAMAGE
    return ExitCode.IO if report.unreadable else ExitCode.DONE


def _count_records(roots: Sequence[str]) -> int:
    """For the bar alone: what cannot be read the verify says itself."""
    with suppress(OSError):
        return volume_info(roots).num_records
    return 0


def _print_problems(what: str, problems: Sequence[Problem]) -> None:
    if problems:
        click.echo(f"{len(problems):,} {what}:")
    for problem in problems[:_SHOWN_PROBLEMS]:
        click.echo(f"  {problem.path}: {problem.reason}{', removed' if problem.is_removed else ''}")
    if len(problems) > _SHOWN_PROBLEMS:
        click.echo(f"  and {len(problems) - _SHOWN_PROBLEMS:,} more (--json has all)")


@command.command("evict")
@_roots
@click.option("--until", metavar="ROOM", help="Evict the least used records until so much is free: 10%, 20GiB a DIR.")
@click.option("--namespace", "prefixes", multiple=True, metavar="ID", help="Remove a namespace; info shows the ids.")
@click.option("--salt", metavar="TEXT", help="Remove all namespaces of servers that were configured with this salt.")
@click.option("--pinned-too", is_flag=True, help="Pinned records as well (rewarm kv pins).")
@json_option
@quiet_option
def evict(
    roots: Sequence[str], until: str | None, prefixes: Sequence[str], salt: str | None, pinned_too: bool, as_json: bool
) -> None:
    """Remove records, while servers may use the volume: what is gone is a miss to them. Pinned ones stay."""
    if not until and not prefixes and salt is None:
        raise UsageError("nothing says what to evict", hint="give --until, --namespace or --salt")
    if until and (prefixes or salt is not None):
        raise UsageError(
            "--until goes by use, and not together with --namespace or --salt", hint="give one, then the other"
        )
    if until:
        room = _parse_room(until)
        infos = [root_info(root, file) for root, file in read_roots(roots).items()]
        sizes = [(info.file.capacity_bytes, info.usage.used_bytes) for info in infos]
        surplus = sum(max(0, used + room(capacity) - capacity) for capacity, used in sizes)
        with progress("evict", surplus, in_bytes=True) as advance:
            done = evict_until(roots, room, pinned_too=pinned_too, advance=advance)
        if done.num_bytes < surplus and not pinned_too and any(map(pin_names, roots)):
            note("note: there is less room than asked for: the rest is pinned (rewarm kv pins, or --pinned-too)")
    else:
        done = _purge(roots, prefixes, salt, pinned_too=pinned_too)
    if as_json:
        print_json({"schema": "rewarm.volume.evict/1", "records": done.num_records, "bytes": done.num_bytes})
    else:
        click.echo(f"{done.num_records:,} records removed, {format_size(done.num_bytes)}")


def _parse_room(text: str) -> Callable[[int], int]:
    """Capacity of a root -> bytes to be free in it."""
    if not text.endswith("%"):
        num_bytes = parse_size(text)
        return lambda _capacity: num_bytes
    with suppress(ValueError):
        share = float(text[:-1]) / 100
        if 0 <= share <= 1:
            return lambda capacity: int(capacity * share)
    raise UsageError(f"{text!r} is no share of the volume", hint="write it like 10% or 20GiB")


def _purge(roots: Sequence[str], prefixes: Sequence[str], salt: str | None, *, pinned_too: bool) -> Evicted:
    groups = [roots]
    if tier := host_tier_info(volume_info(roots).id, resolve(KvConfig).config.host_root):
        groups.append([tier.path])
    by_id = {namespace.id: namespace for group in reversed(groups) for namespace in volume_info(group).namespaces}
    found = list(by_id.values())
    chosen = choose(found, prefixes)
    if salt is not None:
        digest = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest() if salt else ""
        salted = [namespace for namespace in found if namespace.identity.get("salt") == digest]
        if not salted:
            raise UsageError("no namespace has this salt", hint="rewarm volume info DIR lists them")
        chosen += [namespace for namespace in salted if namespace not in chosen]
    pinned = pins_of(roots, {namespace.id for namespace in chosen})
    if pinned and not pinned_too:
        raise UsageError(
            f"pins name records of it: {', '.join(pinned[:10])}", hint="rewarm kv unpin first, or give --pinned-too"
        )
    with progress("evict", sum(namespace.num_records for namespace in chosen)) as advance:
        done, *copies = (purge(group, [namespace.id for namespace in chosen], advance=advance) for group in groups)
    if tier is not None:
        note(f"note: {copies[0].num_records:,} copies were removed from the host tier in {tier.path}, too")
    return done


@command.command("export")
@_roots
@click.option("--to", "target", required=True, metavar="FILE", help="A tar file that does not exist yet; - is stdout.")
@click.option("--namespace", "prefixes", multiple=True, metavar="ID", help="Only this namespace; repeatable.")
@json_option
@quiet_option
def export(roots: Sequence[str], target: str, prefixes: Sequence[str], as_json: bool) -> ExitCode:
    """Write all whole records into one tar file. Exit code 5 when some were left out: damaged, or not to be read."""
    if target == "-" and as_json:
        raise UsageError("--json and the archive cannot both go to stdout", hint="name a file with --to")
    found = volume_info(roots).namespaces
    chosen = choose(found, prefixes) if prefixes else found
    only = [namespace.id for namespace in chosen]
    with progress("export", sum(namespace.num_records for namespace in chosen)) as advance:
        if target == "-":
            done = export_archive(roots, sys.stdout.buffer, only=only, advance=advance)
        else:
            done = _export_to_file(roots, target, only, advance)
    if as_json:
        print_json({"schema": "rewarm.volume.export/1", **dataclasses.asdict(done)})
    else:
        note(f"{done.num_records:,} records exported, {format_size(done.num_bytes)}; {done.num_left_out} left out")
    return ExitCode.DAMAGE if done.num_left_out else ExitCode.DONE


def _export_to_file(
    roots: Sequence[str], target: str, only: Sequence[bytes], advance: Callable[[int], None]
) -> Exported:
    """Under another name until it is whole."""
    if os.path.lexists(target):
        raise UsageError(f"{target} exists", hint="name another file, or remove it")
    _remove_dead_partials(target)
    partial = f"{target}.{os.getpid()}.partial"  # two exports at once to one name: the last one whole wins
    try:
        with open(partial, "wb") as file:  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_EX)
            done = export_archive(roots, file, only=only, advance=advance)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.filename in {None, partial}:
            raise StorageError(
                f"{target} cannot be written: {error.strerror}", path=target, errno=error.errno or 0
            ) from error
        raise
    return done


def _remove_dead_partials(target: str) -> None:
    """What exports to this name left that were killed: nobody holds its lock."""
    for partial in glob.glob(f"{glob.escape(target)}.*.partial"):
        with suppress(OSError), open(partial, "rb") as file:  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _UNLOCKED_S:
                os.unlink(partial)


@command.command("import")
@_roots
@click.option("--from", "source", required=True, metavar="FILE", help="An archive of rewarm volume export; - is stdin.")
@json_option
@quiet_option
def import_(roots: Sequence[str], source: str, as_json: bool) -> None:
    """Check the records of an archive and store them; started again, it goes on where it was.

    Records that the volume has no room for make older ones go, as if a server stored them.
    """
    if source == "-":
        _import(sys.stdin.buffer, roots, 0, as_json)
        return
    with open(source, "rb") as file:  # noqa: PTH123
        _import(file, roots, os.fstat(file.fileno()).st_size, as_json)


def _import(stream: BinaryIO, roots: Sequence[str], num_bytes: int, as_json: bool) -> None:
    with progress("import", num_bytes, in_bytes=True) as advance:
        done = import_archive(stream, roots, advance=advance)
    if as_json:
        print_json({"schema": "rewarm.volume.import/1", **dataclasses.asdict(done)})
    else:
        click.echo(
            f"{done.num_records:,} records imported, {done.num_present:,} were there, "
            f"{format_size(done.num_bytes)} checked"
        )
