from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from rewarm.config import MAX_FILE_BYTES, SECTIONS, KvConfig, resolve, variable_name
from rewarm.errors import StorageError, UsageError
from rewarm.units import GIB


def test_defaults_have_the_origin_default() -> None:
    resolved = resolve(KvConfig, environ={})
    assert resolved.config == KvConfig()
    assert set(resolved.origins.values()) == {"default"}


def test_each_source_beats_those_below_it(tmp_path: Path) -> None:
    file = tmp_path / "rewarm.toml"
    file.write_text('[kv]\nsalt = "file"\nstore = "on_reuse"\nchunk_tokens = 1\nnum_workers = 1\n')
    resolved = resolve(
        KvConfig,
        arguments={"salt": "argument", "engine": None},
        server={"salt": "server", "chunk_tokens": 3},
        environ={
            "REWARM_CONFIG": str(file),
            "REWARM_KV_SALT": "variable",
            "REWARM_KV_CHUNK_TOKENS": "2",
            "REWARM_KV_NUM_WORKERS": "2",
        },
    )
    config, origins = resolved.config, resolved.origins
    assert (config.salt, origins["salt"]) == ("argument", "argument")
    assert (config.chunk_tokens, origins["chunk_tokens"]) == (3, "server")
    assert (config.num_workers, origins["num_workers"]) == (2, "REWARM_KV_NUM_WORKERS")
    assert (config.store, origins["store"]) == ("on_reuse", str(file))
    assert (config.engine, origins["engine"]) == ("auto", "default")


def test_text_is_read_as_its_field_wants_it() -> None:
    environ = {
        "REWARM_KV_ROOTS": "/a:/b",
        "REWARM_KV_CAPACITY_BYTES": "200GiB",
        "REWARM_KV_READ_ONLY": "Yes",
        "REWARM_KV_LOAD_DEADLINE_S": "2.5",
    }
    config = resolve(KvConfig, environ=environ, server={"durable": False, "load_deadline_s": 7}).config
    assert config.roots == ("/a", "/b")
    assert config.capacity_bytes == 200 * GIB
    assert config.read_only is True
    assert config.load_deadline_s == 7.0
    assert resolve(KvConfig, environ={}, server={"roots": ["/a"], "capacity_bytes": 2 * GIB}).config.roots == ("/a",)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"rots": ["/a"]}, "has no key 'rots'; did you mean 'roots'?"),
        ({"capacity": "2GiB"}, "did you mean 'capacity_bytes'?"),
        ({"zzz": 1}, "has no key 'zzz'"),
        ({"chunk_tokens": "many"}, "not a number"),
        ({"chunk_tokens": 1.5}, "not a whole number"),
        ({"chunk_tokens": True}, "not a whole number"),
        ({"read_only": "maybe"}, "not true or false"),
        ({"read_only": 1}, "not true or false"),
        ({"salt": 5}, "not text"),
        ({"roots": 5}, "not a list of paths"),
        ({"roots": [""]}, "not a list of paths"),
        ({"roots": ["relative"]}, "not an absolute path"),
        ({"roots": ["/a", "/a"]}, "twice"),
        ({"capacity_bytes": "1MiB"}, "capacity_bytes is 1.0 MiB"),
        ({"capacity_bytes": -1}, "capacity_bytes is -1 B"),
        ({"capacity_bytes": "big"}, "not a size"),
        ({"store_bytes_per_day": "0.1"}, "less than a byte"),
        ({"host_bytes": "1MiB"}, "host_bytes is 1.0 MiB"),
        ({"host_bytes": -1}, "host_bytes is -1 B"),
        ({"host_bytes": 10**400}, "too large"),
        ({"host_root": "shm"}, "host_root is 'shm', which is not an absolute path"),
        ({"host_root": 7}, "not text"),
        ({"policy": "always-load"}, "did you mean 'always_load'?"),
        ({"store": "xyzzy"}, "kv.store is 'xyzzy'"),
        ({"engine": "uring"}, "did you mean 'io_uring'?"),
        ({"num_workers": 1000}, "num_workers"),
        ({"ring_bytes": 5}, "ring_bytes"),
        ({"store_buffer_bytes": 5}, "store_buffer_bytes"),
        ({"load_deadline_s": 0}, "load_deadline_s"),
        ({"load_deadline_s": float("nan")}, "load_deadline_s"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s"),
        ({"load_deadline_s": 10**400}, "too large"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
        ({"chunk_tokens": "9" * 400}, "too large"),
        ({"capacity_bytes": 10**400}, "too large"),
        ({"salt": "\udcff"}, "no text"),
    ],
)
def test_a_wrong_value_is_refused_and_named(server: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(KvConfig, environ={}, server=server)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(UsageError, match=r"kv \(REWARM_KV_ROOT\) has no key 'root'; did you mean 'roots'\?"):
        resolve(KvConfig, environ={"REWARM_KV_ROOT": "/a"})


def test_a_misspelt_key_or_table_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[kv]\nchunk_token = 3\n")
    with pytest.raises(UsageError, match=r"r\.toml\) has no key 'chunk_token'; did you mean 'chunk_tokens'\?"):
        resolve(KvConfig, environ={}, config_file=str(file))
    file.write_text("[kvv]\nchunk_tokens = 3\n")
    with pytest.raises(UsageError, match=r"has no key 'kvv'; did you mean 'kv'\?"):
        resolve(KvConfig, environ={}, config_file=str(file))
    file.write_text("kv = 3\n")
    with pytest.raises(UsageError, match="kv is not a table"):
        resolve(KvConfig, environ={}, config_file=str(file))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        resolve(KvConfig, environ={"REWARM_CONFIG": str(tmp_path / "none")})
    broken = tmp_path / "broken.toml"
    for content in (b"= \xff", b"x=" + b"[" * 100_000, b"x=" + b"9" * 5000):
        broken.write_bytes(content)
        with pytest.raises(UsageError, match="is not TOML"):
            resolve(KvConfig, environ={}, config_file=str(broken))


@pytest.mark.parametrize("section", SECTIONS)
def test_defaults_pass_their_own_checks_and_names_are_distinct(section: type[KvConfig]) -> None:
    section()
    names = [variable_name(section, field.name) for field in dataclasses.fields(section)]
    assert len(set(names)) == len(names)


def test_a_file_without_an_end_is_not_read_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge.toml"
    os.mkfifo(pipe)
    huge.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for path in ("/dev/zero", str(pipe), str(tmp_path), str(huge)):
        with pytest.raises(UsageError) as caught:
            resolve(KvConfig, environ={"REWARM_CONFIG": path})
        assert caught.value.hint


@pytest.mark.parametrize("key", ["salt", "roots", "num_workers", "policy", "durable", "dwpd", "x" * 1_000_000])
def test_a_long_value_is_not_repeated_whole(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(KvConfig, server={key: ["y" * 1_000_000, 3]}, environ={})
    assert caught.value.hint
    assert len(caught.value.message) < 700
