"""rewarm volume, as a user calls it; the guide's own commands are run in test_volume_guide."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from volumes import MIB, Bench, load, namespace_of, record_files, record_path, store, tree

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.engine.workers import TMPFS, file_system_type
from rewarm.volume import Outcome, create_volume
from rewarm.volume.host_tier import host_root, prepare
from rewarm.volume.layout import RootPaths, read_root_file
from rewarm.volume.quota import tenant_of

Captured = pytest.CaptureFixture[str]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "volume.md"


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """A volume with 24 records of one namespace and 6 of another, closed."""
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    bench = Bench()
    volume = bench.open(root)
    store(namespace_of(volume), range(24))
    salt = "1b4f0e9851971998e732078544c96b36c3d01cedf7caa332359d6f1d83567014"  # sha256 of test1
    store(namespace_of(volume, dtype="bfloat16", salt=salt), range(6))
    bench.close()
    return root


def call(capsys: Captured, *words: str) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    code = run(cli, ["volume", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_commands_of_the_guide_do_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    commands = 0
    for block in blocks:
        for piece in block.split("$ ")[1:]:
            line, _, expected = piece.partition("\n")
            words = shlex.split(line)
            assert words[0] == "rewarm"
            run_ = subprocess.run(
                [sys.executable, "-m", "rewarm.cli.main", *words[1:]],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert run_.returncode == 0, (line, run_.stderr)
            if expected:
                assert run_.stdout.replace(str(tmp_path), "/data") == expected
            commands += 1
    assert commands >= 9


def test_info_shows_what_differs_and_what_is_shared(filled: str, capsys: Captured) -> None:
    assert run(cli, ["volume", "info", filled]) == 0
    text = capsys.readouterr().out
    assert "records 30, index 16.0 KiB a process" in text
    assert re.search(r"namespace [0-9a-f]{12}: 24 records of 60.0 KiB, 1.5 MiB\n  dtype  float32\n", text)
    assert re.search(r"all of them:\n  block_tokens  16\n  model +tiny\n", text)
    code, document = call(capsys, "info", filled)
    assert code == 0
    assert document["schema"] == "rewarm.volume.info/1"
    assert document["records"] == 30
    assert document["used_bytes"] == 30 * 65536
    assert sorted(n["records"] for n in document["namespaces"]) == [6, 24]
    assert {n["identity"]["dtype"] for n in document["namespaces"]} == {"float32", "bfloat16"}


def test_info_warns_of_very_many_records(filled: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.cli.volume.MANY_RECORDS", 29)
    assert run(cli, ["volume", "info", filled]) == 0
    assert "30 records are more than 29" in capsys.readouterr().err
    assert run(cli, ["volume", "info", filled, "--quiet"]) == 0
    assert not capsys.readouterr().err


def test_info_prints_nothing_that_moves_a_terminal(tmp_path: Path, capsys: Captured) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=8 * MIB)
    bench = Bench()
    namespace_of(bench.open(root), evil="\x1b[31mred\u202e", lone="\ud800", long="x" * 500)
    bench.close()
    assert run(cli, ["volume", "info", root]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) < 200


def test_verify_finds_damage_and_repairs_it(filled: str, capsys: Captured) -> None:
    code, report = call(capsys, "verify", filled)
    assert (code, report["num_records"], report["damaged"]) == (0, 30, [])
    files = record_files(filled)
    with files[3].open("r+b") as file:
        file.seek(9000)
        file.write(b"!")
    with files[5].open("ab") as file:
        file.write(b"more")
    files[7].unlink()
    files[7].mkdir()
    (files[9].parent / ("0" * 64 + ".rec")).symlink_to(files[9])  # no name of its directory: not a record
    code, report = call(capsys, "verify", filled)
    assert code == 5
    assert {problem["path"] for problem in report["damaged"]} == {str(files[n]) for n in (3, 5, 7)}
    code, report = call(capsys, "verify", filled, "--repair")
    assert code == 5
    assert all(problem["is_removed"] for problem in report["damaged"])
    assert run(cli, ["volume", "verify", filled]) == 0
    assert "27 records read" in capsys.readouterr().out


def test_verify_says_which_records_cannot_be_read(filled: str, capsys: Captured) -> None:
    namespace = Path(filled) / json.loads(_info(filled, capsys))["namespaces"][0]["id"]
    (namespace / "namespace.json").unlink()
    code, report = call(capsys, "verify", filled)
    assert code == 5
    assert "no description" in report["damaged"][0]["reason"]


def _info(root: str, capsys: Captured) -> str:
    run(cli, ["volume", "info", root, "--json"])
    return capsys.readouterr().out


@pytest.mark.parametrize("until", ["90%", "7.3MiB"])
def test_evict_until_makes_room(until: str, filled: str, capsys: Captured) -> None:
    code, done = call(capsys, "evict", filled, "--until", until)
    assert code == 0
    left = len(record_files(filled))
    assert 9 <= left <= 12
    assert done == {"schema": "rewarm.volume.evict/1", "records": 30 - left, "bytes": (30 - left) * 65536}
    code, done = call(capsys, "evict", filled, "--until", until)
    assert (code, done["records"]) == (0, 0)


def test_evict_asks_the_janitor_that_runs(filled: str, capsys: Captured) -> None:
    bench = Bench()
    volume = bench.open(filled, janitor=True)
    code, done = call(capsys, "evict", filled, "--until", "90%")
    volume.close()
    bench.close()
    assert code == 0
    assert done["records"] >= 18
    assert len(record_files(filled)) == 30 - done["records"]


def test_evict_by_namespace_and_by_salt(filled: str, capsys: Captured) -> None:
    namespaces = {n["records"]: n["id"] for n in json.loads(_info(filled, capsys))["namespaces"]}
    code, done = call(capsys, "evict", filled, "--salt", "test1")
    assert (code, done["records"]) == (0, 6)
    assert not (Path(filled) / namespaces[6]).exists()
    code, done = call(capsys, "evict", filled, "--namespace", namespaces[24][:12])
    assert (code, done["records"]) == (0, 24)
    document = json.loads(_info(filled, capsys))
    assert (document["records"], document["used_bytes"], document["namespaces"]) == (0, 0, [])


def test_a_server_goes_on_after_its_namespace_was_emptied(filled: str, capsys: Captured) -> None:
    bench = Bench()
    namespace = namespace_of(bench.open(filled))
    assert run(cli, ["volume", "evict", filled, "--namespace", namespace.id.hex()[:8]]) == 0
    assert load(namespace, range(24)) == [Outcome.MISS] * 24
    assert store(namespace, range(24)) == [True] * 24
    assert load(namespace, range(24)) == [Outcome.HIT] * 24
    bench.close()
    assert json.loads((capsys.readouterr().out, _info(filled, capsys))[1])["namespaces"][0]["identity"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["evict"], 2, "nothing says what to evict"),
        (["evict", "--until", "ten%"], 2, "'ten%' is no share"),
        (["evict", "--until", "200%"], 2, "'200%' is no share"),
        (["evict", "--until", "1TiB"], 2, "can never be free"),
        (["evict", "--until", "1%", "--salt", "a"], 2, "not together"),
        (["evict", "--namespace", "ab"], 2, "too short"),
        (["evict", "--namespace", "abcdef"], 2, "no namespace begins"),
        (["evict", "--salt", "nobody"], 2, "no namespace has this salt"),
        (["export", "--to", "kv"], 2, "exists"),
        (["import", "--from", "not-there.tar"], 4, "not-there.tar"),
        (["evict", "--until", "9" * 5000], 2, "is not a size"),
        (["evict", "--salt", "\udcff"], 2, "no namespace has this salt"),
        (["top", "--interval", "nan"], 2, "--interval is nan"),
        (["top", "--interval", "1e300"], 2, "--interval is 1e+300"),
        (["info", "two\nlines"], 2, "two\\nlines holds no volume"),
    ],
)
def test_a_wrong_argument_is_one_line_and_changes_nothing(
    words: list[str], code: int, says: str, filled: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(filled).parent)
    before = tree(filled)
    assert run(cli, ["volume", words[0], filled, *words[1:]]) == code
    lines = capsys.readouterr().err.splitlines()
    assert says in lines[0]
    assert len(lines) <= 2
    after = {name: what for name, what in tree(filled).items() if name not in {".rewarm/janitor.lock", ".rewarm/order"}}
    assert after == {name: what for name, what in before.items() if name in after}


def test_export_and_import_bring_every_record_over(filled: str, tmp_path: Path, capsys: Captured) -> None:
    archive = tmp_path / "kv.tar"
    files = record_files(filled)
    files[0].write_bytes(b"damage")
    code, done = call(capsys, "export", filled, "--to", str(archive))
    assert (code, done["num_records"], done["num_left_out"]) == (5, 29, 1)
    with tarfile.open(archive) as tar:
        assert len(tar.getnames()) == 31
    other = str(tmp_path / "other")
    create_volume([other], capacity_bytes=8 * MIB)
    code, done = call(capsys, "import", other, "--from", str(archive))
    assert (code, done["num_records"], done["num_present"]) == (0, 29, 0)
    code, done = call(capsys, "import", other, "--from", str(archive))
    assert (code, done["num_records"], done["num_present"]) == (0, 0, 29)
    assert {p.name for p in record_files(other)} == {p.name for p in files[1:]}
    assert run(cli, ["volume", "verify", other]) == 0
    assert not list(tmp_path.glob("*.partial"))


def test_export_removes_what_a_killed_one_left_and_nothing_that_is_being_written(
    filled: str, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "a.tar"
    dead, young, held = (tmp_path / f"a.tar.{number}.partial" for number in (1, 2, 3))
    for path in (dead, young, held):
        path.write_bytes(b"half")
    for path in (dead, held):
        os.utime(path, (1, 1))
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _ = call(capsys, "export", filled, "--to", str(target))
    assert (code, target.exists()) == (0, True)
    assert (dead.exists(), young.exists(), held.exists()) == (False, True, True)


def test_export_of_one_namespace_through_a_pipe(filled: str, tmp_path: Path, capsys: Captured) -> None:
    namespace = next(n for n in json.loads(_info(filled, capsys))["namespaces"] if n["records"] == 6)
    other = str(tmp_path / "other")
    create_volume([other], capacity_bytes=8 * MIB)
    rewarm = f"{shlex.quote(sys.executable)} -m rewarm.cli.main volume"
    piped = subprocess.run(
        [
            "sh",
            "-c",
            f"{rewarm} export {filled} --namespace {namespace['id'][:8]} --to - | {rewarm} import {other} --from -",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert piped.returncode == 0, piped.stderr
    assert "6 records imported" in piped.stdout
    assert len(record_files(other)) == 6


def test_top_prints_rates(filled: str, capsys: Captured) -> None:
    code, document = call(capsys, "top", filled)
    assert code == 0
    (shown,) = document["roots"]
    assert (shown["path"], shown["used_bytes"], shown["trouble"]) == (filled, 30 * 65536, "")
    assert document["processes"] == document["skipped"] == []
    assert run(cli, ["volume", "top", filled, "--once"]) == 0
    text = capsys.readouterr().out
    assert "0.00" in text
    assert "no process stores on it now" in text


def test_a_record_that_is_gone_is_no_damage(filled: str, capsys: Captured) -> None:
    bench = Bench()
    namespace = namespace_of(bench.open(filled))
    record_path(filled, namespace, 0).unlink()
    bench.close()
    code, report = call(capsys, "verify", filled)
    assert (code, report["num_records"]) == (0, 29)


def test_quota_sets_shows_and_takes_away(filled: str, capsys: Captured) -> None:
    assert call(capsys, "quota", filled) == (
        0,
        {"schema": "rewarm.volume.quota/1", "default_share": 1.0, "tenants": []},
    )
    call(capsys, "quota", filled, "--default", "25%")
    code, shown = call(capsys, "quota", filled, "--tenant", "acme", "--max", "2MiB")
    digest = tenant_of("acme").hex()
    assert (code, shown["default_share"]) == (0, 0.25)
    assert shown["tenants"] == [{"tenant": digest, "share": 0.25, "bytes": 0}]
    Path(RootPaths(filled).tenants).write_text(json.dumps({digest: 4096, "0b" * 7: 12}))
    _, shown = call(capsys, "quota", filled, "--tenant", "acme", "--max", "50%")
    assert shown["tenants"][0] == {"tenant": digest, "share": 0.5, "bytes": 4096}
    assert shown["tenants"][1] == {"tenant": "0b" * 7, "share": 0.25, "bytes": 12}
    _, shown = call(capsys, "quota", filled, "--tenant", "acme", "--remove")
    assert shown["tenants"][0]["share"] == 0.25
    assert "acme" not in Path(RootPaths(filled).quotas).read_text(), "no file has a salt"


@pytest.mark.parametrize(
    "words", [["--tenant", "a"], ["--max", "1%"], ["--tenant", "a", "--max", "1%", "--remove"], ["--default", "101%"]]
)
def test_quota_refuses_what_says_nothing(words: list[str], filled: str, capsys: Captured) -> None:
    assert run(cli, ["volume", "quota", filled, *words]) == 2
    assert not Path(RootPaths(filled).quotas).exists()


@pytest.mark.parametrize("held", ["9" * 400, "-1", "1e400", "true", '"many"'])
def test_quota_shows_nothing_for_what_is_no_size(held: str, filled: str, capsys: Captured) -> None:
    digest = tenant_of("acme").hex()
    Path(RootPaths(filled).tenants).write_text(f'{{"{digest}": {held}}}')
    _, shown = call(capsys, "quota", filled)
    assert shown["tenants"] == [{"tenant": digest, "share": 1.0, "bytes": 0}]
    assert run(cli, ["volume", "quota", filled]) == 0


def test_info_shows_the_wear_against_what_the_drive_is_rated_for(filled: str, capsys: Captured) -> None:
    _, found = call(capsys, "info", filled, "--dwpd", "0.5")
    (root,) = found["roots"]
    assert root["written_bytes_total"] == root["written_bytes_last_day"] == root["written_bytes_per_day_mean"]
    assert root["written_bytes_total"] == root["used_bytes"] > 0
    assert root["rated_dwpd"] == 0.5
    assert run(cli, ["volume", "info", filled, "--dwpd", "0.5"]) == 0
    assert "of 0.5 rated" in capsys.readouterr().out
    assert run(cli, ["volume", "info", filled]) == 0
    assert "rated" not in capsys.readouterr().out


@pytest.fixture
def tiered(filled: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The volume, and its host tier with copies of four records of each namespace and of one that flash lacks."""
    if file_system_type("/dev/shm") != TMPFS:
        pytest.skip("/dev/shm is no tmpfs here")
    place = tempfile.mkdtemp(prefix="rewarm-test-", dir="/dev/shm")
    monkeypatch.setenv("REWARM_KV_HOST_ROOT", place)
    host = host_root(read_root_file(filled).volume_id, place)
    prepare(host, 64 * MIB)
    bench = Bench()
    copies = bench.open(host)
    salt = "1b4f0e9851971998e732078544c96b36c3d01cedf7caa332359d6f1d83567014"  # sha256 of test1
    store(namespace_of(copies), range(4))
    store(namespace_of(copies, dtype="bfloat16", salt=salt), range(4))
    store(namespace_of(copies, dtype="int8", salt=salt), range(2))
    bench.close()
    yield filled, host
    shutil.rmtree(place)


def test_info_names_the_host_tier(tiered: tuple[str, str], capsys: Captured) -> None:
    root, host = tiered
    assert run(cli, ["volume", "info", root]) == 0
    assert f"its host tier on this machine is {host}: 640.0 KiB of 64.0 MiB used" in capsys.readouterr().err
    code, document = call(capsys, "info", root)
    assert code == 0
    assert (document["host_tier"]["path"], document["host_tier"]["used_bytes"]) == (host, 10 * 65536)
    assert len(document["roots"]) == 1
    shutil.rmtree(host)
    assert call(capsys, "info", root)[1]["host_tier"] is None


def test_the_host_tier_is_verified_like_any_volume(tiered: tuple[str, str], capsys: Captured) -> None:
    _, host = tiered
    damaged = record_files(host)[0]
    damaged.write_bytes(damaged.read_bytes()[:9000] + bytes(3) + damaged.read_bytes()[9003:])
    code, document = call(capsys, "verify", host)
    assert (code, len(document["damaged"])) == (5, 1)


def test_what_is_purged_goes_from_the_host_tier_too(tiered: tuple[str, str], capsys: Captured) -> None:
    root, host = tiered
    assert run(cli, ["volume", "evict", root, "--salt", "test1"]) == 0
    said = capsys.readouterr()
    assert "6 records removed" in said.out
    assert f"6 copies were removed from the host tier in {host}, too" in said.err
    assert len(record_files(host)) == 4, "those without the salt"
    assert len(record_files(root)) == 24
