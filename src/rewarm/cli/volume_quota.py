"""``rewarm volume quota``: which part of a volume a tenant may hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

import click

from rewarm.cli.common import json_option, print_json, print_table, quiet_option
from rewarm.errors import UsageError
from rewarm.units import MAX_SIZE, format_size, parse_size
from rewarm.volume.access import changing
from rewarm.volume.layout import RootPaths, read_roots, read_small_file
from rewarm.volume.quota import Quotas, read_quotas, tenant_of, write_quotas


@click.command("quota")
@click.argument("roots", nargs=-1, required=True, metavar="DIR...")
@click.option("--tenant", metavar="SALT", help="Of requests with this cache_salt.")
@click.option("--max", "limit", metavar="ROOM", help="What the tenant may hold: 10%, or a size over all DIRs.")
@click.option("--default", "default", metavar="ROOM", help="What each tenant without a quota of its own may hold.")
@click.option("--remove", is_flag=True, help="Take the tenant's own quota away.")
@json_option
@quiet_option
def command(
    roots: Sequence[str], tenant: str | None, limit: str | None, default: str | None, remove: bool, as_json: bool
) -> None:
    """Show or set what tenants may hold; the janitor removes what is above, within seconds.

    A tenant is who sends requests with one cache_salt. Requests without one have no quota.
    """
    files = read_roots(roots)
    capacity_bytes = sum(file.capacity_bytes for file in files.values())
    quotas = read_quotas(next(iter(files)))
    changed = _changed(quotas, tenant, limit, default, remove=remove, capacity_bytes=capacity_bytes)
    if changed != quotas:
        for root in files:
            with changing(root):
                write_quotas(root, changed)
    held = _held(list(files))
    shares = {digest.hex(): share for digest, share in changed.tenants.items()}
    shares |= {digest: changed.default for digest in held if digest not in shares}
    if as_json:
        shown = [{"tenant": name, "share": share, "bytes": held.get(name, 0)} for name, share in shares.items()]
        print_json({"schema": "rewarm.volume.quota/1", "default_share": changed.default, "tenants": shown})
        return
    click.echo(f"each tenant: {changed.default:.1%}, {format_size(int(changed.default * capacity_bytes))}")
    rows = [
        (name, format_size(int(share * capacity_bytes)), f"{share:.1%}", format_size(held.get(name, 0)))
        for name, share in shares.items()
    ]
    print_table(("tenant (digest of its cache_salt)", "may hold", "of the volume", "holds"), rows)


def _changed(
    quotas: Quotas, tenant: str | None, limit: str | None, default: str | None, *, remove: bool, capacity_bytes: int
) -> Quotas:
    """The quotas as the options ask for them."""
    if (tenant is None) != (limit is None and not remove) or (limit is not None and remove):
        raise UsageError(
            "a tenant's quota needs --tenant and either --max or --remove", hint="like --tenant acme --max 10%"
        )
    tenants = dict(quotas.tenants)
    if tenant is not None:
        if not tenant:
            raise UsageError(
                "a tenant's cache_salt is not empty",
                hint="requests without one have no quota; --default is for the others",
            )
        tenants.pop(tenant_of(tenant), None)
        if limit is not None:
            tenants[tenant_of(tenant)] = _share(limit, capacity_bytes)
    return Quotas(quotas.default if default is None else _share(default, capacity_bytes), tenants)


def _share(text: str, capacity_bytes: int) -> float:
    """A part of the capacity, 0 to 1."""
    if not text.endswith("%"):
        return min(1.0, parse_size(text) / capacity_bytes)
    with suppress(ValueError):
        share = float(text[:-1]) / 100
        if 0 <= share <= 1:
            return share
    raise UsageError(f"{text!r} is no part of the volume", hint="write it like 10% or 20GiB")


def _held(roots: Sequence[str]) -> dict[str, int]:
    """Digest to bytes over all roots, as the janitors last said."""
    held: dict[str, int] = {}
    for root in roots:
        found: object = {}
        with suppress(OSError, ValueError):  # no janitor has said it yet, or it is not whole
            found = json.loads(read_small_file(RootPaths(root).tenants))
        for name, num_bytes in found.items() if isinstance(found, dict) else ():
            is_size = type(num_bytes) is int and 0 <= num_bytes <= MAX_SIZE  # the file may say anything
            held[name] = held.get(name, 0) + (num_bytes if is_size else 0)
    return held
