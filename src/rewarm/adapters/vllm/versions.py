"""Which vLLM versions this adapter knows, and what differs between them.

What can be felt for (a hook that is there or not, a constant that exists) is felt for where it is used; this file holds
what cannot.
"""

from __future__ import annotations

import re

from rewarm.errors import AdapterError

KNOWN = ((0, 20, 1), (0, 33))
"""Oldest and newest version tried; every patch release of the newest minor counts."""

Version = tuple[int, ...]


def can_fail_requests() -> bool:
    """Whether this vLLM can be told that the load of a whole request failed, and tells which blocks a request holds
    now: from 0.30 on.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.sched import output

    results = getattr(base, "KVConnectorTransferResults", None)
    return "failed_recving" in getattr(results, "__dataclass_fields__", ()) and hasattr(output, "KVConnectorBlockState")


def parse_version(text: str) -> Version:
    """The leading numbers of a version: ``0.32.0+cpu`` is (0, 32, 0).

    Raises:
        AdapterError: There are none.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise AdapterError(f"vLLM calls its version {text!r}, which is no version", hint=_ALLOW)
    return tuple(int(part) for part in match.group(1).split("."))


_ALLOW = (
    'start it all the same with "allow_untested": true in kv_connector_extra_config '
    "(rewarm vllm config --allow-untested)"
)


def check_version(text: str, *, allow_untested: bool) -> None:
    """Refuse a vLLM that this adapter was never tried with.

    Raises:
        AdapterError: It is older or newer than KNOWN, and was not allowed.
    """
    oldest, newest = KNOWN
    if allow_untested:
        return
    version = parse_version(text)
    if version < oldest or version[: len(newest)] > newest:
        age = "older" if version < oldest else "newer"
        raise AdapterError(
            f"vLLM {text} is {age} than what Rewarm was tried with ({_dotted(oldest)} to {_dotted(newest)})",
            hint=_ALLOW,
        )


def drains_finished_requests(text: str) -> bool:
    """Whether a server keeps stepping while a connector holds blocks of finished requests; an idle one that does not
    would hold them until the next request.

    Source: Scheduler.has_finished_requests() of 0.20.1 and 0.23.0.
    """
    return parse_version(text) >= (0, 23)


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
