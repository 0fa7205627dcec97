"""How a command is told a prompt and a server's namespaces; ``rewarm kv pin`` and ``prefetch`` share it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from rewarm.adapters.vllm.prompt_keys import prompt_entries
from rewarm.cli.server import ask_server
from rewarm.errors import StorageError, UnsupportedError, UsageError
from rewarm.inputs import read_input
from rewarm.volume.evict import choose
from rewarm.volume.info import NamespaceInfo, volume_info

F = TypeVar("F", bound=Callable[..., Any])

_SHORT = 12
_OPTIONS = (
    click.option("--tokens", metavar="FILE", help="The prompt's token ids: a JSON list."),
    click.option("--text", metavar="FILE", help="The prompt as text; needs --server or --tokenizer."),
    click.option("--messages", metavar="FILE", help="A chat, as in a request's messages: JSON; needs --server."),
    click.option("--server", metavar="URL", help="A running server that tokenizes --text or --messages."),
    click.option("--tokenizer", metavar="DIR", help="A model's directory whose tokenizer.json tokenizes --text."),
    click.option("--namespace", metavar="ID", help="Of which server; needed where the volume has several."),
    click.option("--cache-salt", metavar="SALT", default="", help="The cache_salt that requests of this prompt send."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What prompt_options() gives a command."""

    tokens: str | None
    text: str | None
    messages: str | None
    server: str | None
    tokenizer: str | None
    namespace: str | None
    cache_salt: str

    @property
    def is_given(self) -> bool:
        """Whether a prompt was named."""
        return any(one is not None for one in (self.tokens, self.text, self.messages))


@dataclass(frozen=True, slots=True)
class PromptRecords:
    """What of a volume a prompt is."""

    num_tokens: int
    num_chunks: int
    entries: list[tuple[bytes, bytes]]
    """(namespace id, key), as a pin has them."""


def prompt_options(command: F) -> F:
    """The options that name a prompt; the command gets each by its name."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def prompt_records(roots: Sequence[str], options: PromptOptions) -> PromptRecords:
    """The records of the prompt that was named.

    Raises:
        UsageError, UnsupportedError, StorageError: What was named is none, cannot be read, or has no records.
    """
    namespaces = _namespaces(roots, options.namespace)
    tokens = _tokens(options)
    num_chunks, entries = prompt_entries(namespaces, tokens, options.cache_salt)
    return PromptRecords(len(tokens), num_chunks, entries)


def _namespaces(roots: Sequence[str], prefix: str | None) -> dict[bytes, Mapping[str, Any]]:
    """Id to identity of the namespaces of one server: one, or one for each layout that its ranks have."""
    by_server: dict[str, list[NamespaceInfo]] = {}
    found = [namespace for namespace in volume_info(roots).namespaces if not namespace.trouble]
    for namespace in found:
        by_server.setdefault(_of_server(namespace), []).append(namespace)
    if prefix is not None:
        (chosen,) = choose(found, [prefix])
        return {namespace.id: namespace.identity for namespace in by_server[_of_server(chosen)]}
    if not found:
        raise UsageError(
            "the volume has no namespace yet", hint="a server makes its own with its first request; ask it once"
        )
    if len(by_server) > 1:
        ids = ", ".join(group[0].id.hex()[:_SHORT] for group in by_server.values())
        raise UsageError(
            f"the volume has the records of {len(by_server)} kinds of servers",
            hint=f"name one with --namespace: {ids[:400]}; rewarm volume info DIR shows what they are of",
        )
    (group,) = by_server.values()
    return {namespace.id: namespace.identity for namespace in group}


def _of_server(namespace: NamespaceInfo) -> str:
    return json.dumps({name: value for name, value in namespace.identity.items() if name != "layout"}, sort_keys=True)


def _tokens(options: PromptOptions) -> list[int]:
    given = [name for name in ("tokens", "text", "messages") if getattr(options, name) is not None]
    if len(given) != 1:
        raise UsageError("a prompt is named in one way", hint="give one of --tokens, --text, --messages")
    if options.tokens is not None:
        found = _json(options.tokens)
        if not isinstance(found, list):
            raise UsageError(f"{options.tokens} is no list of token ids", hint="a JSON list, like [1, 15043, 3186]")
        return found
    if options.text is not None and options.tokenizer is not None and options.server is None:
        return _by_tokenizer(_text(options.text), options.tokenizer)
    if options.server is None or options.tokenizer is not None:
        tokenizers = "--server or --tokenizer" if options.text is not None else "--server"
        raise UsageError("something has to tokenize the prompt", hint=f"give {tokenizers}, not both")
    if options.text is not None:
        return _by_server(options.server, {"prompt": _text(options.text)})
    assert options.messages is not None
    return _by_server(options.server, {"messages": _json(options.messages), "add_generation_prompt": False})


def _text(path: str) -> str:
    try:
        return read_input(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", hint="UTF-8, as it is sent to the server") from None


def _json(path: str) -> Any:
    try:
        return json.loads(read_input(path))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON", hint="a JSON list") from None


def _by_server(url: str, body: Any) -> list[int]:
    answer = ask_server(url, "/tokenize", body)
    try:
        tokens = json.loads(answer)["tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StorageError(
            f"{url} does not tokenize", hint="a vLLM server has /tokenize; or give --tokens or --tokenizer"
        ) from None
    return tokens if isinstance(tokens, list) else []


def _by_tokenizer(text: str, directory: str) -> list[int]:
    try:
        import tokenizers
    except ImportError:
        raise UnsupportedError(
            "--tokenizer needs the Python package 'tokenizers', which is not installed",
            hint="pip install tokenizers; or give --server or --tokens",
        ) from None
    content = read_input(os.path.join(directory, "tokenizer.json"))
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the package raises plain Exceptions
        raise UsageError(
            f"{directory} has a tokenizer.json that cannot be read: {str(error)[:200]}", hint="or give --server"
        ) from None
    return list(tokenizer.encode(text).ids)
