"""``rewarm volume top``: pictures as text, as JSON, live on a terminal; hostile names move no terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from volumes import MIB, Bench, load, namespace_of, store, wait_for

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.volume import create_volume
from rewarm.volume.layout import RootPaths
from rewarm.volume.live import Live, Numbers, RootNumbers, pack
from rewarm.volume.session import Session
from rewarm.volume.watch import look_at

Captured = pytest.CaptureFixture[str]
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "TERM": "xterm", "COLUMNS": "200"}


@pytest.fixture
def used(tmp_path: Path) -> Iterator[list[str]]:
    """A volume of two roots that this process uses; what it says of itself is there."""
    roots = [str(tmp_path / name) for name in "ab"]
    create_volume(roots, capacity_bytes=64 * MIB)
    bench = Bench()
    volume = bench.open(*roots)
    namespace = namespace_of(volume)
    assert all(store(namespace, range(40)))
    load(namespace, range(40))
    volume.counters.add("rewarm_kv_lookup_tokens_total", 400)
    volume.counters.add("rewarm_kv_hit_tokens_total", 100)
    wait_for(lambda: all(_tokens(root) for root in roots), "what the process says")
    yield roots
    bench.close()


def _tokens(root: str) -> float:
    return sum(live.numbers.lookup_tokens for live in look_at(root).lives)


def top(*words: str) -> list[str]:
    return [sys.executable, "-m", "rewarm.cli.main", "volume", "top", *words]


def test_json_has_the_roots_the_processes_and_what_was_skipped(used: list[str], capsys: Captured) -> None:
    os.mkdir(os.path.join(RootPaths(used[0]).sessions, "1-foreign"))
    os.mkfifo(os.path.join(RootPaths(used[0]).sessions, "1-foreign", "lock"))
    assert run(cli, ["volume", "top", *used, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "rewarm.volume.top/1"
    assert document["found_token_ratio_since_start"] == 0.25
    assert [root["path"] for root in document["roots"]] == used
    assert sum(root["used_bytes"] for root in document["roots"]) == 40 * 65536
    (process,) = document["processes"]
    assert (process["pid"], process["is_stale"]) == (os.getpid(), False)
    assert process["totals"]["records"] == 40
    assert not {"records", "load_queue_bytes"} & set(process["gains_a_second"])
    (skipped,) = document["skipped"]
    assert "1-foreign" in skipped


def test_text_is_a_table_of_roots_and_one_of_processes(used: list[str], capsys: Captured) -> None:
    assert run(cli, ["volume", "top", used[0], "--once"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^volume [0-9a-f]{12} .*tokens found: - now, 25% since start +lost: 0 loads, 0 stores", text)
    assert re.search(rf"^{used[0]} +\d+% +\d\.\d\d +\d\.\d\d .* ok$", text, re.MULTILINE)
    assert re.search(rf"^{used[1]} +- .*not named", text, re.MULTILINE), "its processes know it"
    assert re.search(rf"^\S*\[{os.getpid()}\] +\S+ +0h00m .* 40 +ok$", text, re.MULTILINE)


def test_names_that_move_a_terminal_are_shown_as_text(used: list[str], capsys: Captured) -> None:
    told = Live(
        "9" * 32, 1, "\x1b[2Jhost", "[red]\nx", 0, time.time_ns(), 1.0, Numbers(), {"c" * 32: ("/\x07c", RootNumbers())}
    )
    session = Session(RootPaths(used[0]))
    session.tell(pack(told))
    assert run(cli, ["volume", "top", *used, "--once"]) == 0
    text = capsys.readouterr().out
    assert "?[2Jhost" in text
    assert "[red]?x[1]" in text
    assert all(character.isprintable() or character == "\n" for character in text)
    session.close()


@pytest.mark.parametrize("interval", ["0.1", "nan", "1e300", "-1"])
def test_an_interval_that_makes_no_sense(interval: str, used: list[str], capsys: Captured) -> None:
    assert run(cli, ["volume", "top", *used, "--interval", interval]) == 2
    assert "--interval is" in capsys.readouterr().err


def test_without_a_terminal_it_prints_on_until_its_reader_goes(used: list[str]) -> None:
    running = subprocess.Popen(
        top(*used, "--interval", "0.2"), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stderr is not None
    headlines = 0
    while headlines < 2:  # what hangs is ended by the test's own limit
        line = running.stdout.readline()
        assert line, running.stderr.read()
        headlines += line.startswith("volume ")
    running.stdout.close()
    assert running.wait(60) in {0, 128 + signal.SIGPIPE, -signal.SIGPIPE}
    assert "Traceback" not in running.stderr.read()
    running.stderr.close()


def test_on_a_terminal_it_is_live_until_ctrl_c(used: list[str]) -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        top(*used, "--interval", "0.2"), env=ENV, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        shown = _read_until(ours, lambda text: text.count("tokens found") >= 3, "three pictures")
        assert used[1] in shown
        running.send_signal(signal.SIGINT)
        _read_until(ours, lambda text: "\x1b[?1049l" in text, "the screen as it was before")
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(ours)


def _read_until(terminal: int, is_enough: Any, what: str) -> str:
    text, end = "", time.monotonic() + 60
    while not is_enough(text):
        assert time.monotonic() < end, f"waited 60 s for {what}: {text[-2000:]}"
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text
