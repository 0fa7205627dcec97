"""Quotas of tenants: the file, and the janitor that keeps them over restarts and for several servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from volumes import MIB, RECORD_BYTES, Bench, key, namespace_of, record_path, store

from rewarm.errors import DamageError, FormatVersionError
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import RootPaths
from rewarm.volume.quota import NO_TENANT, Quotas, WatchedQuotas, read_quotas, tenant_of, write_quotas
from rewarm.volume.usage import read_usage

ACME, OTHER = tenant_of("acme"), tenant_of("other")


def left(root: str, namespace: object, numbers: range) -> list[int]:
    return [number for number in numbers if record_path(root, namespace, number).exists()]  # type: ignore[arg-type]


def work(root: str) -> None:
    """One round of a janitor, from start to end."""
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    janitor.finish()


def test_quotas_read_back_and_a_tenant_has_its_own_or_the_default(root: str) -> None:
    assert read_quotas(root) == Quotas()
    quotas = Quotas(0.25, {ACME: 0.5, OTHER: 0.0})
    write_quotas(root, quotas)
    assert read_quotas(root) == quotas
    limits = [quotas.limit_bytes(tenant, 1000) for tenant in (ACME, OTHER, tenant_of("third"), NO_TENANT)]
    assert limits == [500, 0, 250, 1000]
    assert tenant_of("") == NO_TENANT


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"format": "rewarm.quotas", "version": 2, "default": 1, "tenants": {}}',
        '{"format": "rewarm.quotas", "version": 1, "default": 2, "tenants": {}}',
        '{"format": "rewarm.quotas", "version": 1, "default": 1, "tenants": {"zz": 1}}',
        '{"format": "rewarm.quotas", "version": 1, "default": true, "tenants": []}',
    ],
)
def test_an_unsound_file_is_said_once_and_the_quotas_before_hold_on(root: str, text: str) -> None:
    write_quotas(root, Quotas(0.5))
    watched = WatchedQuotas(root)
    assert watched.now().default == 0.5
    Path(RootPaths(root).quotas).unlink()
    Path(RootPaths(root).quotas).write_text(text)
    with pytest.raises(FormatVersionError if '"version": 2' in text else DamageError):
        watched.now()
    assert watched.now().default == 0.5
    write_quotas(root, Quotas(0.75))
    assert watched.now().default == 0.75


def test_the_hint_of_an_unsound_file_can_be_followed(root: str) -> None:
    path = Path(RootPaths(root).quotas)
    path.write_text("junk")
    with pytest.raises(DamageError) as caught:
        read_quotas(root)
    assert "remove this file" in caught.value.hint
    path.unlink()
    assert read_quotas(root) == Quotas()


def test_a_newer_file_is_refused_by_its_version(root: str) -> None:
    write_quotas(root, Quotas(0.5))
    path = Path(RootPaths(root).quotas)
    newer = path.read_text().replace('"version": 1', '"version": 2')
    path.write_text(newer)
    with pytest.raises(FormatVersionError, match="version 2"):
        read_quotas(root)
    assert path.read_text() == newer


def test_the_janitor_keeps_a_quota_of_two_servers_over_restarts(root: str, bench: Bench) -> None:
    write_quotas(root, Quotas(1.0, {ACME: 10 * RECORD_BYTES / (64 * MIB)}))
    for numbers in (range(8), range(8, 16)):
        volume = bench.open(root)
        namespace = namespace_of(volume)
        namespace.own([key(number) for number in numbers], ACME)
        namespace.own([key(number) for number in range(100, 130)], OTHER)
        assert all(store(namespace, [*numbers, *range(100, 130), *range(200, 230)]))
        volume.close()
        work(root)
    acme = left(root, namespace, range(16))
    assert 9 <= len(acme) <= 10
    assert len(left(root, namespace, range(100, 230))) == 60, "others have none"
    assert read_usage(RootPaths(root).usage).evicted_records == 16 - len(acme)
    write_quotas(root, Quotas(0.0))
    work(root)
    assert left(root, namespace, range(130)) == []
    assert len(left(root, namespace, range(200, 230))) == 30, "requests without a salt have no quota"


def test_damaged_quotas_do_not_stop_the_janitor(root: str, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    volume = bench.open(root)
    assert all(store(namespace_of(volume), range(20)))
    volume.close()
    Path(RootPaths(root).quotas).write_text("{")
    janitor = RootJanitor(root)
    janitor.prepare()
    janitor.step()
    assert janitor.evict(5 * RECORD_BYTES) == 5 * RECORD_BYTES
    janitor.finish()
    assert "the quotas stay as they were" in caplog.text
