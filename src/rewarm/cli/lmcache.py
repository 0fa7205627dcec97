"""``rewarm lmcache``: the configuration of LMCache with its KV on a volume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import click

from rewarm.adapters.lmcache.pitfalls import pitfalls
from rewarm.adapters.lmcache.settings import read_settings
from rewarm.cli.common import note
from rewarm.cli.ensure import ensure_volume, size_option
from rewarm.errors import UsageError

CLASSES = {"server": "RewarmL2", "engine": "RewarmBackend"}
MODULE = "rewarm.adapters.lmcache"
CONNECTORS = {
    "server": ("LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector"),
    "engine": ("LMCacheConnectorV1Dynamic", "lmcache.integration.vllm.lmcache_connector_v1"),
}
"""LMCache's own; without the module's path vLLM takes the copy that it bundles, which is of another version."""
MAX_CPU_GIB = 1 << 20
MAX_CHUNK_TOKENS = 1 << 20


@click.group("lmcache")
def command() -> None:
    """Configure LMCache with its KV on a volume."""


@command.command("config")
@click.option(
    "--mode", type=click.Choice(list(CLASSES)), required=True, help="LMCache's own server, or inside of vLLM."
)
@click.option("--root", "roots", multiple=True, metavar="DIR", help="A directory of the volume; repeatable.")
@click.option("--size", metavar="SIZE", help="What the volume may hold, like 200GiB; needed to make one.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=DIR",
    help="Where a model's weights lie, or label:TEXT for what they are; repeatable.",
)
@click.option("--chunk-size", type=click.IntRange(1, MAX_CHUNK_TOKENS), default=256, help="Tokens in a chunk. [256]")
@click.option("--cpu-gib", type=click.IntRange(1, MAX_CPU_GIB), default=32, help="LMCache's memory, in GiB. [32]")
@click.option("--read-only", is_flag=True, default=None, help="Load, but neither store nor evict.")
@click.option("--durable", is_flag=True, default=None, help="fsync each record.")
@click.option("--salt", metavar="TEXT", help="Servers with different salts never share a record.")
@click.option("--allow-untested", is_flag=True, default=None, help="Start with an LMCache that was never tried.")
def config(
    mode: str,
    roots: tuple[str, ...],
    size: str | None,
    models: tuple[str, ...],
    chunk_size: int,
    cpu_gib: int,
    **flags: Any,
) -> None:
    """Print LMCache's configuration; make the volume where there is none.

    Of its server: one line of JSON for lmcache server --l2-adapter. Inside of vLLM: a YAML file, for
    LMCACHE_CONFIG_FILE.
    How to start vLLM, and what would make LMCache lose KV here, goes to stderr.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if not roots:
        raise UsageError("no directory was named", hint=f"rewarm lmcache config --mode {mode} --root DIR --size 200GiB")
    given["roots"] = [os.path.abspath(root) for root in roots]
    weights = dict(_weights(model) for model in models)
    if weights:
        given["weights"] = weights
    capacity_bytes = {} if size is None else {"capacity_bytes": size_option("--size", size)}
    ensure_volume(read_settings({**given, **capacity_bytes}, where="the options").kv)
    if mode == "server":
        spec = {"type": "plugin", "module_path": MODULE, "class_name": CLASSES[mode], "adapter_params": given}
        click.echo(json.dumps(spec, separators=(",", ":")))
    else:
        click.echo(engine_yaml(given, chunk_size=chunk_size, cpu_gib=cpu_gib), nl=False)
    _explain(mode, chunk_size=chunk_size, cpu_gib=cpu_gib)


def engine_yaml(given: Mapping[str, Any], *, chunk_size: int, cpu_gib: int) -> str:
    """LMCache's configuration file for its engine inside of vLLM."""
    extra = {
        "storage_plugin.rewarm.module_path": MODULE,
        "storage_plugin.rewarm.class_name": CLASSES["engine"],
        **{f"rewarm.{name}": value for name, value in given.items()},
    }
    lines = [
        f"chunk_size: {chunk_size}",
        "local_cpu: true",
        f"max_local_cpu_size: {cpu_gib}",
        "save_unfull_chunk: false",
        "pre_caching_hash_algorithm: sha256_cbor",
        'storage_plugins: ["rewarm"]',
        "extra_config:",
        *(f"  {name}: {json.dumps(value)}" for name, value in extra.items()),  # JSON is YAML
    ]
    return "\n".join(lines) + "\n"


def _weights(text: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise UsageError(
            f"--model is {text!r}, which is not NAME=DIR", hint="the name that vLLM serves, and the weights' directory"
        )
    return name, place if place.startswith("label:") else os.path.abspath(place)


def _explain(mode: str, *, chunk_size: int, cpu_gib: int) -> None:
    connector, module = CONNECTORS[mode]
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    text = json.dumps(transfer, separators=(",", ":"))
    if mode == "server":
        note(
            f"lmcache server --chunk-size {chunk_size} --l1-size-gb {cpu_gib} --eviction-policy LRU "
            "--l2-adapter 'the line above'"
        )
        note(f"vllm serve MODEL --kv-transfer-config '{text}'")
    else:
        note(f"PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=FILE vllm serve MODEL --kv-transfer-config '{text}'")
    note("keep kv_connector_module_path: without it vLLM takes the LMCache connector that it bundles")
    for line in pitfalls(os.environ, in_process=mode == "engine"):
        note(f"warning: {line}")
