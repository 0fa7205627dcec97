"""Talking to a running server over HTTP: its address as a person writes it, and errors that say what to do."""

from __future__ import annotations

import json
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rewarm.errors import StorageError, UsageError
from rewarm.inputs import shown
from rewarm.units import MIB

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * MIB


def ask_server(url: str, path: str, body: Any = None) -> bytes:
    """What a server answers: a GET, or a POST of JSON where there is a body.

    Args:
        url: ``http://host:port``, or without the scheme; a path that it ends with may stand there already.
        path: Like ``/metrics``.
        body: Plain JSON.
    Raises:
        UsageError: That is no address.
        StorageError: No answer, or an error.
    """
    not_an_address = UsageError(f"{shown(url)} is not a server's address", hint="like http://127.0.0.1:8000")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:
        raise not_an_address from None
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise not_an_address
    address = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix(path).rstrip('/')}{path}"
    content = None if body is None else json.dumps(body).encode()
    try:
        request = Request(address, data=content, headers={"Content-Type": "application/json"})  # noqa: S310 - as below
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - http or https, checked above
            answer = bytes(response.read(MAX_ANSWER_BYTES))
            if response.length:
                raise HTTPException("its answer is cut, or without an end")
            return answer
    except HTTPError as error:
        raise StorageError(
            f"{address} answers {error.code} {error.reason}",
            hint="is this the address of the vLLM server itself, not of a router?",
        ) from error
    except InvalidURL:
        raise not_an_address from None
    except (URLError, OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StorageError(
            f"{address} does not answer: {reason}", hint="is the server up, and the port right?"
        ) from error
