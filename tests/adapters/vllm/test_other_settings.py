"""One directory, six servers one after the other, each with one setting of its own: none finds what another stored.

Every server computes under a salt first, which nobody else uses: what it says without a cache. Then it is asked what
all those before it stored.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_server as vs
from vllm_server import CHUNK_TOKENS, Answer, Server, needs_vllm, prompt_of

from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.deep, needs_vllm]

PROMPT_TOKENS = 2048
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
PROMPT = prompt_of(0, PROMPT_TOKENS)
STRETCHED = json.dumps({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}})
SETTINGS: dict[str, tuple[tuple[str, ...], str, str, bool]] = {
    "base": (("--block-size", "32"), "", "", False),
    "dtype": (("--block-size", "32", "--dtype", "bfloat16"), "model.dtype", "bfloat16", False),
    "block size": (("--block-size", "64"), "kv.block_tokens", "64", False),
    "RoPE scaling": (("--block-size", "32", "--hf-overrides", STRETCHED), "rope.rope_type", "linear", True),
    "revision": (("--block-size", "32", "--revision", "v2"), "model.revision", "v2", False),
    "weights": (("--block-size", "32"), "model.weights.digest", "", True),
}
"""Name -> flags, the field of the identity that tells it from the first, its value there ("": any other), and whether
the tokens must differ from the first one's: where they do, a block of the first one's would have shown."""


class Root:
    """The directory, and what each server said on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny = ensure_tiny_model(folder / "model")
        self.root = folder / "root"
        self.root.mkdir(mode=0o700)
        self.transfer = vs.transfer_config(self.root, "--chunk-tokens", str(CHUNK_TOKENS))
        self.computed: dict[str, Answer] = {}
        self.namespaces: dict[str, str] = {}
        """Name of the setting -> id of the namespace that came with it."""

    def model(self, name: str) -> Path:
        """The tiny model; for the setting of that name with other weights."""
        if name != "weights":
            return self.tiny
        other = self.folder / "other"
        if not other.exists():
            shutil.copytree(self.tiny, other)
            _double_half_of_the_embeddings(other / "model.safetensors")
        return other

    def info(self, *flags: str) -> str:
        """What ``rewarm volume info`` says."""
        command = [sys.executable, "-m", "rewarm.cli.main", "volume", "info", str(self.root), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _double_half_of_the_embeddings(weights: Path) -> None:
    """Other weights of the same shapes: the exponent of every second value of one tensor is one higher."""
    data = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    begin, end = (8 + header_bytes + offset for offset in header["model.embed_tokens.weight"]["data_offsets"])
    for at in range(begin + 2, end, 8):  # byte 2 of a little-endian float32 holds the lowest bit of its exponent
        data[at] ^= 0x80
    weights.write_bytes(data)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    folder = tmp_path_factory.mktemp("settings")
    yield Root(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_of_other_settings_hits_nothing_and_is_right(shared: Root, name: str) -> None:
    flags, _, _, must_differ = SETTINGS[name]
    known = {namespace["id"]: namespace["records"] for namespace in json.loads(shared.info("--json"))["namespaces"]}
    log = shared.folder / f"{name}.log"
    with Server(shared.model(name), log, *flags, transfer=shared.transfer) as server:
        alone = server.ask(PROMPT, salt="nobody else's")
        shared.computed[name] = alone
        found = server.ask(PROMPT)
        assert server.metric("rewarm_kv_hit_tokens_total") == 0
        assert found.tokens == alone.tokens
        server.wait_for_records(shared.root, (len(known) + 1) * 2 * NUM_CHUNKS)
        server.reset_prefix_cache()
        assert server.ask(PROMPT).tokens == alone.tokens
        assert server.metric("rewarm_kv_hit_tokens_total") == PROMPT_TOKENS
        assert server.metric("rewarm_damaged_records_total") == server.metric("rewarm_io_errors_total") == 0
    assert server.process.returncode == 0
    assert not must_differ or alone.tokens != shared.computed["base"].tokens
    now = {namespace["id"]: namespace["records"] for namespace in json.loads(shared.info("--json"))["namespaces"]}
    (new,) = set(now) - set(known)
    assert {**now, new: 2 * NUM_CHUNKS} == {**known, new: 2 * NUM_CHUNKS}, "records of another namespace changed"
    shared.namespaces[name] = new


def test_info_shows_what_tells_the_namespaces_apart(shared: Root) -> None:
    if set(shared.namespaces) != set(SETTINGS):
        pytest.skip("the servers above, which fill the directory, did not all run")
    sections = {part.split(":")[0].strip(): part for part in shared.info().split("\nnamespace ")[1:]}
    assert set(sections) == {namespace[:12] for namespace in shared.namespaces.values()}
    shown = {name: _values(sections[namespace[:12]]) for name, namespace in shared.namespaces.items()}
    for name, (_, field, value, _) in SETTINGS.items():
        if field:
            assert shown[name].get(field), f"{field} is not shown for {name}"
            assert shown[name][field] != shown["base"].get(field)
            assert value in {"", shown[name][field]}
    print(shared.info())


def _values(section: str) -> dict[str, str]:
    """Of one namespace: name to value, up to what all of them share."""
    own = section.split("\nall of them:")[0]
    return {name: value.strip() for name, _, value in (line.strip().partition(" ") for line in own.splitlines()[1:])}


def test_the_first_settings_find_their_own_after_all_others(shared: Root) -> None:
    if set(shared.namespaces) != set(SETTINGS):
        pytest.skip("the servers above, which fill the directory, did not all run")
    vs.drop_page_cache(shared.root)
    flags = SETTINGS["base"][0]
    with Server(shared.model("base"), shared.folder / "again.log", *flags, transfer=shared.transfer) as again:
        assert again.ask(PROMPT).tokens == shared.computed["base"].tokens
        assert again.metric("rewarm_kv_hit_tokens_total") == PROMPT_TOKENS
