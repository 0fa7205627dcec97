from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli

Captured = pytest.CaptureFixture[str]


def test_show_prints_each_value_with_its_origin(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("REWARM_KV_ROOTS", "/a:/b")
    assert run(cli, ["config", "show", "--extra", '{"capacity_bytes": "200GiB"}']) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kv.roots", "/a:/b", "REWARM_KV_ROOTS", "REWARM_KV_ROOTS"] in lines
    assert ["kv.capacity_bytes", "200.0", "GiB", "server", "REWARM_KV_CAPACITY_BYTES"] in lines
    assert ["kv.read_only", "false", "default", "REWARM_KV_READ_ONLY"] in lines


def test_show_as_json_takes_the_whole_transfer_config_too(capsys: Captured) -> None:
    extra = {"kv_connector": "RewarmConnector", "kv_connector_extra_config": {"salt": "a"}}
    assert run(cli, ["config", "show", "--json", "--extra", json.dumps(extra)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "rewarm.config/1"
    by_key = {(row["section"], row["key"]): row for row in document["values"]}
    assert by_key["kv", "salt"] == {
        "section": "kv",
        "key": "salt",
        "value": "a",
        "origin": "server",
        "variable": "REWARM_KV_SALT",
    }


def test_show_reads_the_named_file(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[kv]\nnum_workers = 7\n")
    assert run(cli, ["config", "show", "--config", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kv.num_workers", "7", str(file), "REWARM_KV_NUM_WORKERS"] in rows


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('{"root": 1}', "did you mean 'roots'?"),
        ("{", "--extra is not JSON"),
        ("[" * 100_000, "--extra is not JSON"),
        ("9" * 5000, "--extra is not JSON"),
        ("[]", "--extra is not a JSON object"),
        ('{"kv_connector_extra_config": 1}', "is not a JSON object"),
    ],
)
def test_a_wrong_extra_config_is_a_usage_error(extra: str, said: str, capsys: Captured) -> None:
    assert run(cli, ["config", "show", "--extra", extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("error: ")
