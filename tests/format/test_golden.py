"""A volume of version 1 is read byte for byte, and today's code writes the same bytes; the format's page is right."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import make_golden as golden
import pytest
from volumes import Bench, tree

from rewarm.engine import alloc_aligned
from rewarm.engine.base import ToMemory
from rewarm.volume import Outcome
from rewarm.volume.info import volume_info
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths, identity_id
from rewarm.volume.usage import read_usage
from rewarm.volume.verify import verify_volume

PAGE = Path(__file__).parents[2] / "docs" / "format" / "volume-v1.md"


@pytest.fixture
def volume_v1(tmp_path: Path) -> str:
    """A copy."""
    return str(shutil.copytree(golden.PLACE, tmp_path / "v1"))


def test_todays_code_writes_these_bytes(tmp_path: Path) -> None:
    golden.make(tmp_path / "made")
    assert tree(str(tmp_path / "made")) == tree(str(golden.PLACE))


@pytest.mark.parametrize("read_only", [False, True])
def test_every_record_is_read(volume_v1: str, read_only: bool) -> None:
    bench = Bench()
    volume = bench.open(volume_v1, read_only=read_only)
    for identity, num_bytes, numbers in zip(golden.IDENTITIES, golden.PAYLOAD_BYTES, ((0,), (1, 2)), strict=True):
        namespace = volume.namespace(identity, payload_bytes=num_bytes)
        assert namespace.wait_scanned(10)
        assert len(namespace) == len(numbers)
        buffer = alloc_aligned(8192)
        for number in numbers:
            handle = namespace.load([(golden.key(number), ToMemory(buffer.address))])
            assert handle.wait(10)
            assert handle.results() == [Outcome.HIT]
            assert bytes(buffer.view[:num_bytes]) == golden.payload(number, num_bytes)
        buffer.close()
    bench.close()


def test_everything_else_is_read(volume_v1: str) -> None:
    usage = read_usage(RootPaths(volume_v1).usage)
    assert (usage.is_known, usage.used_bytes, usage.evicted_records) == (True, 32768, 1)
    info = volume_info([volume_v1])
    assert (info.id, info.capacity_bytes, info.num_records) == (golden.ROOT.volume_id, 1 << 20, 3)
    assert {namespace.identity["model"] for namespace in info.namespaces} == {"example", "another"}
    report = verify_volume([volume_v1])
    assert (report.num_records, report.damaged) == (3, [])


def test_the_order_of_eviction_is_taken_up(volume_v1: str) -> None:
    """All were used, 0 by the log: 0 and 1 move behind 2 in the main queue, 2 spends its use, and 0 goes first."""
    janitor = RootJanitor(volume_v1)
    janitor.prepare()
    janitor.step()  # takes the log of the dead session in
    assert not list(Path(volume_v1, ".rewarm", "sessions").iterdir())
    assert janitor.evict(1) == 8192
    janitor.finish()
    left = {path.name[:8] for path in Path(volume_v1).glob("*/??/*.rec")}
    assert left == {golden.key(number).hex()[:8] for number in (1, 2)}


def test_the_page_shows_the_record_that_is_there() -> None:
    lines = re.search(r"```hex\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert lines
    content = bytearray()
    for line in lines[1].splitlines():
        if line == "*":
            continue
        offset, _, digits = line.partition("  ")
        content.extend(bytes(int(offset, 16) - len(content)))
        content.extend(bytes.fromhex(digits))
    namespace_id = identity_id(golden.IDENTITIES[0])
    path = Path(RootPaths(str(golden.PLACE)).record(namespace_id, golden.key(0)))
    assert path.read_bytes() == bytes(content)
    assert namespace_id.hex() in PAGE.read_text(encoding="utf-8")
    assert path.name in PAGE.read_text(encoding="utf-8")
