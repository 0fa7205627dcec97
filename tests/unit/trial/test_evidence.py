from __future__ import annotations

from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import DamageError, UsageError
from rewarm.trial.analysis import analyse
from rewarm.trial.evidence import EVENTS, MANIFEST, REPORTS, RESULT, EventLog, check_files, read_events, write_manifest

FILES = (EVENTS, RESULT, MANIFEST, *REPORTS)


def whole(folder: Path) -> bool:
    try:
        return not check_files(folder, analyse(read_events(folder)))
    except DamageError:
        return False


def test_a_folder_as_it_was_written_is_whole(make_trial) -> None:
    make_trial()
    assert whole(make_trial.folder)
    assert run(cli, ["trial", "verify", str(make_trial.folder)]) == 0


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_of_any_file_is_found(make_trial, name: str) -> None:
    make_trial()
    path = make_trial.folder / name
    text = path.read_bytes()
    for place in range(0, len(text), max(1, len(text) // 40)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        assert not whole(make_trial.folder), f"{name}, byte {place}"
    path.write_bytes(text)
    assert whole(make_trial.folder)


@pytest.mark.parametrize("name", FILES)
def test_a_removed_file_exits_5(make_trial, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_trial()
    (make_trial.folder / name).unlink()
    wanted = 2 if name == EVENTS else 5
    assert run(cli, ["trial", "verify", str(make_trial.folder)]) == wanted
    assert ("holds no trial" if name == EVENTS else name) in capsys.readouterr().err


def test_a_changed_figure_with_a_new_chain_does_not_follow(make_trial) -> None:
    """Whoever forges the log and its hashes must forge result.json too, and then the manifest, and sign it all."""
    make_trial()
    folder = make_trial.folder
    events = read_events(folder)
    (folder / EVENTS).unlink()
    keep = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    log = EventLog(folder)
    for event in events:
        kind = event.pop("event")
        fields = {name: value for name, value in event.items() if name not in ("seq", "previous", "at")}
        if kind == "block" and fields["arm"] == "rewarm":
            fields["requests"][0]["ttft_s"] *= 0.9
        log.add(kind, **fields)
    log.close()
    for name, text in keep.items():
        (folder / name).write_bytes(text)
    write_manifest(folder)
    found = check_files(folder, analyse(read_events(folder)))
    assert [line for line in found if RESULT in line and "does not follow" in line]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:3] + lines[4:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [lines[0].replace('"seq":0', '"seq": 0'), *lines[1:]],
        lambda lines: ["{}", *lines[1:]],
        lambda lines: ["[]", *lines[1:]],
        lambda lines: ["\x00", *lines[1:]],
    ],
)
def test_lines_lost_swapped_repeated_or_respelled_break_the_chain(make_trial, change) -> None:
    make_trial()
    path = make_trial.folder / EVENTS
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(DamageError, match=EVENTS):
        read_events(make_trial.folder)


def test_a_log_cut_at_its_end_is_found_by_the_manifest(make_trial) -> None:
    make_trial()
    path = make_trial.folder / EVENTS
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert not whole(make_trial.folder)


def test_events_that_are_not_those_of_a_trial_are_damage(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "t")
    log.add("something")
    log.close()
    with pytest.raises(DamageError, match="not those of a trial"):
        analyse(read_events(tmp_path / "t"))


@pytest.mark.parametrize("line", ['{"a":NaN}', "[]", "[" * 100_000, "9" * 5000, '"\\ud800"'])
def test_a_line_that_is_no_event_exits_5(line: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(line + "\n")
    assert run(cli, ["trial", "verify", str(tmp_path)]) == 5
    assert run(cli, ["trial", "report", str(tmp_path)]) == 5


@pytest.mark.parametrize("samples", [[[-9.0, 1], [-8.0, 2]], [[0.0, []]], [1.0], [[0.0, 0], [1e308, 9]]])
def test_samples_that_no_meter_took_are_damage(make_trial, samples: list[object]) -> None:
    def change(event: str, fields: dict[str, object]) -> None:
        if event == "block":
            fields["samples"] = samples

    with pytest.raises(DamageError, match="not those of a trial"):
        make_trial(change=change)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        EventLog(tmp_path)


def test_no_trial_is_a_usage_error(tmp_path: Path) -> None:
    assert run(cli, ["trial", "verify", str(tmp_path)]) == 2
    assert run(cli, ["trial", "report", str(tmp_path / "none")]) == 2


def test_report_writes_the_same_bytes_again(make_trial) -> None:
    make_trial()
    before = {name: (make_trial.folder / name).read_bytes() for name in FILES}
    assert run(cli, ["trial", "report", str(make_trial.folder)]) == 0
    assert {name: (make_trial.folder / name).read_bytes() for name in FILES} == before
