"""``rewarm vllm``: one line for the server, a volume where there was none, and whether a running server hits."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.cli.vllm import tier_state
from rewarm.errors import ExitCode

Captured = pytest.CaptureFixture[str]


def config(*arguments: str) -> int:
    return run(cli, ["vllm", "config", *arguments])


def test_config_makes_the_volume_once_and_prints_one_line(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    assert config("--root", str(root), "--size", "64MiB") == 0
    first = capsys.readouterr()
    assert first.out.count("\n") == 1
    document = json.loads(first.out)
    assert document["kv_connector"] == "RewarmConnector"
    assert document["kv_connector_module_path"] == "rewarm.adapters.vllm"
    assert document["kv_load_failure_policy"] == "recompute"
    assert document["kv_connector_extra_config"] == {"roots": [str(root)]}
    assert "made a volume of 64.0 MiB" in first.err
    identity = (root / "rewarm.volume").read_bytes()
    assert config("--root", str(root), "--size", "64MiB") == 0
    assert capsys.readouterr() == (first.out, "")
    assert config("--root", str(root), "--size", "32MiB") == ExitCode.USAGE, "less than a volume may hold"
    assert config("--root", str(root), "--size", "128MiB") == 0
    assert "keeps its capacity of 64.0 MiB" in capsys.readouterr().err
    assert config("--root", str(root)) == 0
    assert (root / "rewarm.volume").read_bytes() == identity


def test_flags_reach_the_connector_and_two_roots_are_one_volume(tmp_path: Path, capsys: Captured) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    named = [word for root in roots for word in ("--root", str(root))]
    flags = ["--read-only", "--chunk-tokens", "512", "--policy", "never", "--store", "on_reuse", "--salt", "tenant"]
    assert config(*named, "--size", "64MiB") == 0
    capsys.readouterr()
    assert config(*named, *flags, "--durable", "--allow-untested", "--host-tier", "1.5GiB") == 0
    assert json.loads(capsys.readouterr().out)["kv_connector_extra_config"] == {
        "roots": [str(root) for root in roots],
        "host_bytes": 3 << 29,
        "read_only": True,
        "durable": True,
        "chunk_tokens": 512,
        "policy": "never",
        "store": "on_reuse",
        "salt": "tenant",
        "allow_untested": True,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--size", "64MiB"], ExitCode.USAGE, "no directory was named"),
        (["--root", "{empty}"], ExitCode.USAGE, "no volume in"),
        (["--root", "{empty}", "--size", "0"], ExitCode.USAGE, "--size is 0"),
        (["--root", "{empty}", "--size", "much"], ExitCode.USAGE, "not a size"),
        (["--root", "{empty}", "--size", "64MiB", "--host-tier", "0"], ExitCode.USAGE, "--host-tier is 0"),
        (["--root", "{empty}", "--size", "64MiB", "--host-tier", "1KiB"], ExitCode.USAGE, "kv.host_bytes is 1.0 KiB"),
        (["--root", "{empty}", "--size", "64MiB", "--host-tier", "nan"], ExitCode.USAGE, "not a size"),
        (["--root", "{empty}", "--size", "900TiB"], ExitCode.IO, " free, 900.0 TiB are needed"),
        (["--root", "{foreign}", "--size", "64MiB"], ExitCode.USAGE, "not empty"),
        (["--root", "{empty}", "--size", "64MiB", "--policy", "always"], ExitCode.USAGE, "did you mean 'always_load'"),
        (["--root", "{empty}", "--size", "64MiB", "--read-only"], ExitCode.USAGE, "no volume to read"),
        (["--root", "{empty}/a/b", "--size", "64MiB"], ExitCode.IO, "{empty}/a"),
        (["--root", "{volume}", "--root", "{other}"], ExitCode.USAGE, "two different volumes"),
    ],
)
def test_bad_input_is_one_line_a_hint_and_changes_nothing(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: Captured
) -> None:
    places = {name: tmp_path / name for name in ("empty", "foreign", "volume", "other")}
    for place in places.values():
        place.mkdir()
    (places["foreign"] / "data").write_text("mine")
    for name in ("volume", "other"):
        assert config("--root", str(places[name]), "--size", "64MiB") == 0
    capsys.readouterr()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert config(*(word.format(**places) for word in arguments)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message.format(**places) in err.splitlines()[0]
    assert len(err.splitlines()) <= 2
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_root_that_is_away_is_named_and_stops_no_server(
    tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    named = [word for root in roots for word in ("--root", str(root))]
    assert config(*named, "--size", "64MiB") == 0
    first = capsys.readouterr().out
    roots[1].rename(tmp_path / "unmounted")
    assert config(*named, "--size", "64MiB") == 0
    out, err = capsys.readouterr()
    assert out == first
    assert f"{roots[1]} holds no volume" in caplog.text
    assert "rewarm volume add-root" in err
    assert "keeps its capacity" not in err
    roots[0].rename(tmp_path / "unmounted too")
    assert config(*named) == ExitCode.USAGE


METRICS = """# HELP rewarm_kv_lookup_tokens_total Prompt tokens that were looked up.
rewarm_kv_lookup_tokens_total{engine="0",model_name="m"} 4096.0
rewarm_kv_hit_tokens_total{engine="0",model_name="m"} 2048.0
rewarm_kv_loads_total{engine="0",model_name="m",outcome="hit"} 8.0
rewarm_kv_loads_total{engine="1",model_name="m",outcome="hit"} 2.0
rewarm_kv_loads_total{engine="0",model_name="m",outcome="damaged"} 1.0
rewarm_kv_stores_total{engine="0",model_name="m",outcome="stored"} 8.0
rewarm_kv_store_bytes_total{engine="0",model_name="m"} 3.3554432e+07
vllm:num_requests_running{engine="0"} 0.0
"""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_check_says_that_a_server_hits(server: HTTPServer, capsys: Captured) -> None:
    address = f"127.0.0.1:{server.server_port}"
    for url in (address, f"http://{address}/", f"http://{address}/metrics"):
        assert run(cli, ["vllm", "check", url]) == ExitCode.DONE
        out = capsys.readouterr().out
        assert out.startswith("hits: 2048 of 4096 prompt tokens")
        assert "1 damaged, 10 hit" in out
    assert run(cli, ["vllm", "check", address, "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["loads"] == {"hit": 10, "damaged": 1}


def test_check_tells_no_hits_from_no_tier() -> None:
    assert not tier_state("vllm:num_requests_running 0.0\n").hits
    assert "no tier" in tier_state("vllm:num_requests_running 0.0\n").verdict
    assert "no prompt was looked up" in tier_state("rewarm_kv_lookup_tokens_total 0.0\n").verdict
    assert "is on the volume yet" in tier_state("rewarm_kv_lookup_tokens_total 9.0\n").verdict
    found = tier_state("rewarm_kv_lookup_tokens_total 9.0\nrewarm_kv_hit_tokens_total 4.0\n")
    assert "none was loaded" in found.verdict
    assert not found.hits


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("ftp://127.0.0.1", ExitCode.USAGE, "not a server's address"),
        ("http://[::1", ExitCode.USAGE, "not a server's address"),
        ("127.0.0.1:port", ExitCode.USAGE, "not a server's address"),
        ("http://a b", ExitCode.USAGE, "not a server's address"),
        ("http://127.0.0.1:1", ExitCode.IO, "does not answer"),
    ],
)
def test_check_of_no_server_is_one_line(url: str, code: int, message: str, capsys: Captured) -> None:
    assert run(cli, ["vllm", "check", url]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"garbage\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"])
def test_check_of_what_speaks_no_http_is_one_line(answer: bytes, capsys: Captured) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert run(cli, ["vllm", "check", f"127.0.0.1:{listener.getsockname()[1]}"]) == ExitCode.IO
        thread.join()
    assert "does not answer" in capsys.readouterr().err


def test_check_passes_over_what_is_no_number() -> None:
    text = (
        'rewarm_kv_hit_tokens_total abc\nrewarm_kv_lookup_tokens_total NaN\nrewarm_kv_loads_total{outcome="hit"} +Inf\n'
    )
    assert not tier_state(text).hits


def test_check_of_another_server_says_so(server: HTTPServer, capsys: Captured) -> None:
    assert run(cli, ["vllm", "check", f"http://127.0.0.1:{server.server_port}/deeper"]) == ExitCode.IO
    assert "answers 404" in capsys.readouterr().err
