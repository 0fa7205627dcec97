"""rewarm kv pin, unpin, pins and what rewarm volume evict makes of them, as a user calls them."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from volumes import Bench

from rewarm.adapters.vllm.prompt_keys import prompt_entries
from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.engine import alloc_aligned
from rewarm.errors import ExitCode
from rewarm.volume import create_volume
from rewarm.volume.pins import pin_names, read_pin

Captured = pytest.CaptureFixture[str]
PAYLOAD_BYTES = 60 << 10
CHUNK = 64
TOKENS = [number % 251 for number in range(4 * CHUNK + 7)]
IDENTITY: dict[str, Any] = {
    "server": {"kind": "vllm", "layout_version": 1},
    "kv": {"block_tokens": 16, "chunk_tokens": CHUNK},
    "hashing": {"algorithm": "sha256", "seed": "vllm-none-hash"},
    "topology": {"tp": 1, "pp": 1, "dcp": 1, "pcp": 1},
    "layout": {"planes": 3},
    "run": "",
}


class Place:
    """A volume with a server's namespace in it, and the files that name a prompt."""

    def __init__(self, folder: Path, bench: Bench) -> None:
        self.folder = folder
        self.roots = [str(folder / "a"), str(folder / "b")]
        create_volume(self.roots, capacity_bytes=64 << 20)
        self.volume = bench.open(*self.roots)
        self.namespace = self.namespace_of(IDENTITY)
        self.tokens = self.file("tokens.json", json.dumps(TOKENS))

    def namespace_of(self, identity: dict[str, Any]) -> Any:
        made = self.volume.namespace(identity, payload_bytes=PAYLOAD_BYTES)
        assert made.wait_scanned(30)
        return made

    def file(self, name: str, content: str) -> str:
        (self.folder / name).write_text(content)
        return str(self.folder / name)

    def store(self, num_chunks: int, salt: str = "") -> None:
        """As a server would that computed the prompt."""
        entries = prompt_entries({self.namespace.id: IDENTITY}, TOKENS, salt)[1][: num_chunks * (2 if salt else 1)]
        buffer = alloc_aligned(64 << 10)
        handle = self.namespace.store([(key, buffer.address) for _, key in entries[-num_chunks:]])
        assert handle.wait(30)
        assert all(handle.results())
        buffer.close()

    def pin(self, *options: str, name: str = "system", code: int = ExitCode.DONE) -> None:
        assert run(cli, ["kv", "pin", *self.roots, "--name", name, *options]) == code

    def pins(self, capsys: Captured) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert run(cli, ["kv", "pins", *self.roots, "--json"]) == ExitCode.DONE
        said = json.loads(capsys.readouterr().out)
        assert said["schema"] == "rewarm.kv-pins/1"
        return list(said["pins"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    bench = Bench()
    yield Place(tmp_path, bench)
    bench.close()


def test_a_pinned_prompt_outlives_an_eviction_of_everything(place: Place, capsys: Captured) -> None:
    place.store(3)
    place.pin("--tokens", place.tokens)
    assert "3 of its 4 chunks are on the volume" in capsys.readouterr().out
    (said,) = place.pins(capsys)
    assert (said["name"], said["tokens"], said["chunks"], said["chunks_present"]) == ("system", len(TOKENS), 4, 3)
    assert (said["present_bytes"], said["whole_bytes"]) == (3 * (64 << 10), 4 * (64 << 10))
    assert run(cli, ["volume", "evict", *place.roots, "--until", "100%"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert said.out.startswith("0 records removed")
    assert "the rest is pinned" in said.err
    assert place.pins(capsys)[0]["chunks_present"] == 3
    assert run(cli, ["volume", "evict", *place.roots, "--until", "100%", "--pinned-too"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("3 records removed")
    assert run(cli, ["kv", "unpin", *place.roots, "--name", "system"]) == ExitCode.DONE
    assert place.pins(capsys) == []
    assert run(cli, ["kv", "unpin", *place.roots, "--name", "system"]) == ExitCode.USAGE


def test_a_namespace_with_pins_is_removed_only_where_that_is_said(place: Place, capsys: Captured) -> None:
    place.store(2)
    place.pin("--tokens", place.tokens)
    prefix = place.namespace.id.hex()[:8]
    assert run(cli, ["volume", "evict", *place.roots, "--namespace", prefix]) == ExitCode.USAGE
    assert "pins name records of it: system" in capsys.readouterr().err
    assert run(cli, ["volume", "evict", *place.roots, "--namespace", prefix, "--pinned-too"]) == ExitCode.DONE


def test_pins_are_listed_for_people_with_their_end(place: Place, capsys: Captured) -> None:
    place.pin("--tokens", place.tokens, "--until", "2099-01-31T12:00")
    place.pin("--tokens", place.tokens, "--until", "12h", name="short")
    capsys.readouterr()
    assert run(cli, ["kv", "pins", *place.roots]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "2099-01-31 12:00" in said
    assert "0 of 4" in said
    (Path(place.roots[0]) / ".rewarm/pins/short.pin").write_bytes(b"damaged")
    assert run(cli, ["kv", "pins", *place.roots]) == ExitCode.DAMAGE
    assert "unpin" in capsys.readouterr().err
    assert run(cli, ["kv", "unpin", *place.roots, "--name", "short"]) == ExitCode.DONE


def test_a_salted_prompt_is_pinned_as_either_vllm_spells_it(place: Place, capsys: Captured) -> None:
    place.store(3, salt="tenant")
    place.pin("--tokens", place.tokens)
    assert place.pins(capsys)[0]["chunks_present"] == 0
    place.pin("--tokens", place.tokens, "--cache-salt", "tenant")
    (said,) = place.pins(capsys)
    assert said["chunks_present"] > 0


def test_more_than_half_of_the_volume_needs_force(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("rewarm.cli.kv_pins.MAX_SHARE", 6 * (64 << 10) / (64 << 20))
    place.pin("--tokens", place.tokens)
    place.pin("--tokens", place.tokens)  # replaced, not added
    place.pin("--tokens", place.tokens, name="two", code=ExitCode.USAGE)
    assert "--force" in capsys.readouterr().err
    place.pin("--tokens", place.tokens, "--force", name="two")
    long = place.file("long.json", json.dumps([number % 251 for number in range(1200 * CHUNK)]))
    place.pin("--tokens", long, "--force", name="three", code=ExitCode.USAGE)
    assert "more than the whole volume" in capsys.readouterr().err
    assert pin_names(place.roots[0]) == pin_names(place.roots[1]) == ["system", "two"]


def test_all_ranks_and_layouts_of_one_server_are_pinned_and_other_servers_have_to_be_told_apart(
    place: Place, capsys: Captured
) -> None:
    stage = place.namespace_of({**IDENTITY, "layout": {"planes": 4}})
    place.pin("--tokens", place.tokens)
    assert {where for where, _ in read_pin(place.roots[0], "system").entries} == {place.namespace.id, stage.id}
    other = place.namespace_of({**IDENTITY, "topology": {"tp": 2}})
    place.pin("--tokens", place.tokens, code=ExitCode.USAGE)
    assert other.id.hex()[:12] in capsys.readouterr().err
    place.pin("--tokens", place.tokens, "--namespace", other.id.hex()[:8])
    assert len(read_pin(place.roots[0], "system").entries) == 2 * 4
    foreign = place.namespace_of({"model": "of nobody"})
    place.pin("--tokens", place.tokens, "--namespace", foreign.id.hex()[:8], code=ExitCode.CANNOT)


def test_a_volume_without_a_namespace_says_what_to_do(tmp_path: Path, capsys: Captured) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=64 << 20)
    (tmp_path / "tokens").write_text("[1]")
    assert run(cli, ["kv", "pin", root, "--name", "x", "--tokens", str(tmp_path / "tokens")]) == ExitCode.USAGE
    assert "ask it once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "{}", "3", "null", "[]", "[1, 2]", '["a"]', "[1.5]", "[NaN]", "[1e999]", "[-1]", "[" * 100_000),
        f"[{','.join(['true'] * 300)}]",
        f"[{','.join(['4294967296'] * 300)}]",
    ],
)
def test_tokens_that_are_none_are_refused(place: Place, content: str, capsys: Captured) -> None:
    place.pin("--tokens", place.file("odd", content), code=ExitCode.USAGE)
    said = capsys.readouterr().err
    assert "hint: " in said
    assert len(said) < 600
    assert pin_names(place.roots[0]) == []


def test_files_that_are_no_files_are_refused_at_once(place: Place, capsys: Captured) -> None:
    os.mkfifo(place.folder / "pipe")
    for path in ("/dev/zero", str(place.folder / "pipe"), place.roots[0]):
        place.pin("--tokens", path, code=ExitCode.USAGE)
        assert "is not a regular file" in capsys.readouterr().err
    place.pin("--tokens", str(place.folder / "missing"), code=ExitCode.IO)
    place.pin("--tokens", "", code=ExitCode.IO)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tokens", "TOKENS", "--text", "TOKENS"],
        ["--text", "TOKENS"],
        ["--messages", "TOKENS"],
        ["--text", "TOKENS", "--server", "x", "--tokenizer", "x"],
        ["--messages", "TOKENS", "--tokenizer", "x"],
        ["--tokens", "TOKENS", "--until", "nan"],
        ["--tokens", "TOKENS", "--until", "-1d"],
        ["--tokens", "TOKENS", "--until", "0h"],
        ["--tokens", "TOKENS", "--until", "999999999w" * 100],
        ["--tokens", "TOKENS", "--until", "1999-01-01"],
        ["--tokens", "TOKENS", "--namespace", "ab"],
        ["--tokens", "TOKENS", "--namespace", "ffffffff"],
        ["--text", "TOKENS", "--server", "ftp://x"],
    ],
)
def test_options_that_make_no_prompt_are_refused(place: Place, options: list[str], capsys: Captured) -> None:
    place.pin(*[place.tokens if one == "TOKENS" else one for one in options], code=ExitCode.USAGE)
    assert len(capsys.readouterr().err) < 600


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """Answers /tokenize with the tokens that the last item of the list has, or with that text."""
    asked: list[Any] = [{"tokens": TOKENS}]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = asked[0] if isinstance(asked[0], str) else json.dumps(asked[0])
            asked.append((self.path, body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", asked
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_running_server_tokenizes_text_and_chats(place: Place, server: tuple[str, list[Any]]) -> None:
    url, asked = server
    place.pin("--text", place.file("text", "Grüße"), "--server", url)
    chat = [{"role": "system", "content": "be kind"}]
    place.pin("--messages", place.file("chat", json.dumps(chat)), "--server", url)
    assert asked[1:] == [
        ("/tokenize", {"prompt": "Grüße"}),
        ("/tokenize", {"messages": chat, "add_generation_prompt": False}),
    ]
    assert read_pin(place.roots[0], "system").num_tokens == len(TOKENS)


@pytest.mark.parametrize("answer", ["no JSON", [], {"tokens": "x"}, {"tokens": [None] * 400}, {"count": 3}])
def test_a_server_that_answers_otherwise_is_refused(place: Place, server: tuple[str, list[Any]], answer: Any) -> None:
    url, asked = server
    asked[0] = answer
    assert run(cli, ["kv", "pin", *place.roots, "--name", "x", "--text", place.tokens, "--server", url]) in {2, 4}
    assert pin_names(place.roots[0]) == []


def test_a_tokenizer_of_a_directory_is_used_where_its_package_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (place.folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    place.pin("--text", place.tokens, "--tokenizer", str(place.folder), code=ExitCode.CANNOT)
    assert "pip install tokenizers" in capsys.readouterr().err

    class Tokenizer:
        @staticmethod
        def from_buffer(content: bytes) -> Tokenizer:
            if content != b"{}":
                raise Exception("not a tokenizer")
            return Tokenizer()

        def encode(self, text: str) -> Any:
            return types.SimpleNamespace(ids=json.loads(text))

    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    place.pin("--text", place.tokens, "--tokenizer", str(place.folder))
    assert read_pin(place.roots[0], "system").num_tokens == len(TOKENS)
    (place.folder / "tokenizer.json").write_text("[]")
    place.pin("--text", place.tokens, "--tokenizer", str(place.folder), code=ExitCode.USAGE)


def test_a_prompt_or_a_pin_is_read_and_what_is_absent_or_damaged_is_said(place: Place, capsys: Captured) -> None:
    place.store(3)
    assert run(cli, ["kv", "prefetch", *place.roots, "--tokens", place.tokens]) == ExitCode.ANSWER_IS_NO
    said = capsys.readouterr()
    assert said.out.splitlines() == ["3 records read, 192.0 KiB", "1 of 4 chunks are not on the volume"]
    place.store(4)
    place.pin("--tokens", place.tokens)
    capsys.readouterr()
    assert run(cli, ["kv", "prefetch", *place.roots, "--name", "system", "--json"]) == ExitCode.DONE
    said = json.loads(capsys.readouterr().out)
    assert (said["records"], said["bytes"], said["absent_chunks"]) == (4, 4 * (64 << 10), 0)
    damaged = next(path for root in place.roots for path in Path(root).glob("*/??/*.rec"))
    damaged.write_bytes(bytes(1000))
    assert run(cli, ["kv", "prefetch", *place.roots, "--name", "system"]) == ExitCode.ANSWER_IS_NO
    assert "3 records read, 192.0 KiB, 1 damaged" in capsys.readouterr().out
    assert run(cli, ["kv", "prefetch", *place.roots]) == ExitCode.USAGE
    assert run(cli, ["kv", "prefetch", *place.roots, "--name", "x", "--tokens", place.tokens]) == ExitCode.USAGE
    assert run(cli, ["kv", "prefetch", *place.roots, "--name", "nobody"]) == ExitCode.USAGE
