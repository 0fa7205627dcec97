"""``rewarm config``: what is configured, and where each value came from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import click

from rewarm.cli.common import json_option, print_json, print_table
from rewarm.config import SECTIONS, resolve, variable_name
from rewarm.errors import UsageError
from rewarm.units import format_size


@click.group("config")
def command() -> None:
    """Show what is configured, and where each value came from."""


@command.command("show")
@click.option("--config", "config_file", default="", metavar="FILE", help="The one file to read. [REWARM_CONFIG]")
@click.option("--extra", default="{}", metavar="JSON", help="The server's extra config, or all of its transfer config.")
@json_option
def show(config_file: str, extra: str, as_json: bool) -> None:
    """Print each value with its origin, as a server started from this shell would see it."""
    server = _parse_extra(extra)
    rows = []
    for section in SECTIONS:
        resolved = resolve(section, server=server, config_file=config_file)
        for field in dataclasses.fields(section):
            value = getattr(resolved.config, field.name)
            rows.append((section, field.name, value, resolved.origins[field.name]))
    if as_json:
        print_json(
            {
                "schema": "rewarm.config/1",
                "values": [
                    {
                        "section": section.SECTION,
                        "key": name,
                        "value": value,
                        "origin": origin,
                        "variable": variable_name(section, name),
                    }
                    for section, name, value, origin in rows
                ],
            }
        )
        return
    print_table(
        ("key", "value", "origin", "variable"),
        [
            (f"{section.SECTION}.{name}", _as_text(name, value), origin, variable_name(section, name))
            for section, name, value, origin in rows
        ],
    )


_EXTRA = """what --kv-transfer-config gets, or its kv_connector_extra_config: {"roots": ["/mnt/nvme0/kv"]}"""


def _parse_extra(text: str) -> Mapping[str, Any]:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--extra is not JSON: {error}", hint=_EXTRA) from error
    if not isinstance(extra, dict):
        raise UsageError("--extra is not a JSON object", hint=_EXTRA)
    inner = extra.get("kv_connector_extra_config", extra)
    if not isinstance(inner, dict):
        raise UsageError("kv_connector_extra_config is not a JSON object", hint=_EXTRA)
    return inner


def _as_text(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(value) or "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "-"
