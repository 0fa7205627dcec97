"""Run a trial: the schedule's steps one after another, each ending in an event of the log.

Whatever happens, Ctrl-C included, every server is ended, the tiers' files are removed, and what was measured is
analysed and reported; a trial that was cut short never passes.
"""

from __future__ import annotations

import math
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rewarm import __version__
from rewarm.errors import RewarmError, StorageError
from rewarm.trial import host, prompts
from rewarm.trial.analysis import analyse
from rewarm.trial.arms import Installation, Places, find_vllm, model_path, server_command, server_environment
from rewarm.trial.blocks import of, read_blocks
from rewarm.trial.coldness import drop_page_cache
from rewarm.trial.estimate import Estimate
from rewarm.trial.evidence import EventLog, read_events, write_manifest, write_result
from rewarm.trial.meter import ReadMeter
from rewarm.trial.plan import CONTEXT_CHOICES, PROBE_CONTEXT, Plan, settle
from rewarm.trial.report import write_reports
from rewarm.trial.schedule import (
    CANARY,
    FS,
    FS_LIMITED,
    NOISE,
    RECOMPUTE,
    RESTART,
    REWARM,
    Step,
    is_throttled,
    make_schedule,
    server_of,
)
from rewarm.trial.server import Server

DRAINED_AFTER = 3
"""Looks at the tier's files, half a second apart, that must find them unchanged."""
DRAIN_S = 120.0
IDLE_LOOK_S, IDLE_CORES, IDLE_WAIT_S = 0.2, 0.2, 10.0
"""Servers are idle when all of them use less than so many cores between two looks; waited for at most so long."""
CANARY_PART = 4
"""A canary is this part of a context: it only has to miss."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a running trial is."""

    doing: str
    done: int
    total: int
    left_s: float


Show = Callable[[Progress], None]


def run_trial(plan: Plan, out: Path, show: Show) -> dict[str, Any]:
    """Run a trial into a new folder.

    Args:
        plan: What to compare.
        out: The output folder: new, or empty.
        show: Called as each step begins.
    Returns:
        The document of result.json.
    Raises:
        RewarmError: It could not begin, or a server or the storage failed; in the second case the folder holds a
            report of what was seen until then.
        KeyboardInterrupt: It was interrupted; the folder holds a report too.
    """
    for directory in filter(None, (plan.trial.root, plan.trial.baseline_root)):
        if not Path(directory).is_dir():
            raise StorageError(f"{directory} is not a directory", path=directory, hint=f"mkdir {directory}")
    install = find_vllm()
    above = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free_bytes = psutil.disk_usage(plan.trial.root or str(above)).free
    plan = settle(plan, on_cpu=install.on_cpu, free_bytes=free_bytes)
    seed = plan.trial.seed if plan.trial.seed >= 0 else secrets.randbelow(2**32)
    log = EventLog(out)
    begin_s = time.monotonic()
    with _places(plan, out) as places:
        roots = {"candidate": places.candidate, "baseline": places.baseline}
        environment = host.describe(install, roots)
        log.add("trial_started", plan=plan.as_json(), seed=seed, rewarm=__version__, environment=environment)
        runner = _Runner(plan, seed, install, places, log, out, begin_s)
        outcome, message = "failed", ""
        try:
            runner.run(show)
            outcome = "complete"
        except KeyboardInterrupt:
            outcome, message = "interrupted", "by a signal"
            raise
        except RewarmError as error:
            message = error.message
            raise
        finally:
            with _undisturbed():
                runner.stop_all()
                wall_s = round(time.monotonic() - begin_s, 3)
                log.add("trial_ended", outcome=outcome, message=message, wall_s=wall_s)
                log.close()
                result = finish(out)
    return result


def finish(out: Path) -> dict[str, Any]:
    """Analyse the events of a folder and write all that follows from them; returns the result."""
    events = read_events(out)
    result = analyse(events)
    write_result(out, result)
    write_reports(out, result, events)
    write_manifest(out)
    return result


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep servers from being ended."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _places(plan: Plan, out: Path) -> Iterator[Places]:
    """Folders of this trial alone, below the directories that the plan names; removed at the end."""
    name = f"rewarm-trial-{secrets.token_hex(4)}"
    made: list[Path] = []

    def make(directory: str) -> Path:
        above = Path(directory).resolve() if directory else out.resolve()
        folder = above / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{above} cannot hold a tier: {error.strerror}", path=str(above), errno=error.errno or 0
            ) from error
        made.append(folder)
        return folder

    try:
        candidate = make(plan.trial.root) / REWARM
        baseline = make(plan.trial.baseline_root or plan.trial.root) / FS
        work = make("")
        candidate.mkdir(mode=0o700)
        baseline.mkdir(mode=0o700)
        yield Places(work, candidate, baseline, model_path(plan))
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


class _Runner:
    def __init__(
        self, plan: Plan, seed: int, install: Installation, places: Places, log: EventLog, out: Path, begin_s: float
    ) -> None:
        self._plan, self._seed, self._install, self._places = plan, seed, install, places
        self._log, self._out, self._begin_s = log, out, begin_s
        self._servers: dict[str, Server] = {}
        self._starts = 0
        self._sent: dict[str, set[tuple[str, int]]] = {}
        """What each tier's server was ever sent, as (kind, number): what it has stored."""
        self._limit_bytes_s = 0.0
        self._context_tokens = 0
        self._blocks: list[dict[str, Any]] = []
        self._together = plan.trial.servers == "together" or (plan.trial.servers == "auto" and install.on_cpu)

    def run(self, show: Show) -> None:
        """All steps."""
        self._set_limit(0.0)
        steps = make_schedule(self._plan, self._seed, together=self._together)
        estimate = Estimate(steps)
        for number, step in enumerate(steps):
            show(Progress(_in_words(step), number, len(steps), estimate.left_s()))
            begin_s = time.monotonic()
            getattr(self, f"_{step.kind}")(step)
            estimate.ended(step, time.monotonic() - begin_s)
        show(Progress("write the report", len(steps), len(steps), 0.0))

    def stop_all(self) -> None:
        """End every server that is still there."""
        self._stop(Step("stop", tuple(self._servers)))

    def _start(self, step: Step) -> None:
        folder = self._out / "logs"
        folder.mkdir(exist_ok=True)
        env = server_environment(self._install, self._plan)
        for name in step.servers:
            self._starts += 1
            command = server_command(self._install, self._plan, name, self._places)
            self._servers[name] = Server(name, command, env, folder / f"{self._starts}-{name}.log")
        waiting = [self._servers[name] for name in step.servers]
        while waiting:
            for server in list(waiting):
                if server.is_ready(self._plan.server.start_timeout_s):
                    self._log.add("server_started", **server.describe())
                    waiting.remove(server)
            time.sleep(0.2)

    def _choose(self, _step: Step) -> None:
        """Settle the length of contexts: by the plan, else by the time that a short one takes to compute."""
        chosen, probe_s = self._plan.load.context_tokens, []
        if not chosen:
            probe = prompts.context(self._seed, prompts.PROBE, 0, PROBE_CONTEXT)
            for _ in range(2):  # the first one after a start is slower, and does not count
                self._reset(RECOMPUTE)
                (record,), _ = self._servers[RECOMPUTE].client.complete([(0, probe)], 1)
                if record["error"]:
                    raise StorageError(f"the first request failed: {record['error']}")
                probe_s.append(round(record["ttft_s"], 4))
            chosen = next(length for length, limit_s in CONTEXT_CHOICES if probe_s[-1] <= limit_s)
        self._context_tokens = chosen
        self._log.add("load_chosen", context_tokens=chosen, probe_s=probe_s)

    def _warm(self, step: Step) -> None:
        """A throw-away context of full length, computed and then, by a tier, loaded."""
        (name,) = step.servers
        server = self._servers[name]
        times_s = []
        for _ in range(1 if name == RECOMPUTE else 2):
            self._reset(name)
            records, _ = server.client.complete([self._prompt(name, prompts.WARM_UP, 0)], self._plan.load.output_tokens)
            times_s.append(round(records[0]["total_s"], 4))
            if records[0]["error"]:
                raise StorageError(f"the server of {name} failed in its warm-up: {records[0]['error']}")
        self._log.add("warmed_up", server=name, total_s=times_s)

    def _block(self, step: Step) -> None:
        name = server_of(step.arm)
        server = self._servers[name]
        self._set_limit(self._limit_bytes_s if step.arm == FS_LIMITED else 0.0)
        asked = self._prompts(step)
        self._reset(name)
        root = self._places.root_of(name)
        cold = drop_page_cache(root) if root else None
        before = server.client.counters()
        self._wait_idle()
        start_s = time.monotonic() - self._begin_s
        with ReadMeter(server.read_bytes) as meter:
            records, wall_s = server.client.complete(asked, self._plan.load.output_tokens)
        block = {
            "arm": step.arm,
            "phase": step.phase,
            "group": step.group,
            "pair": step.pair,
            "start_s": round(start_s, 4),
            "wall_s": wall_s,
            "requests": records,
            "counters": server.client.counters_after(before, len(records)),
            "read_bytes": meter.total,
            "cold": cold,
            "samples": meter.samples,
            "limit_bytes_s": self._limit_bytes_s if step.arm == FS_LIMITED else 0.0,
        }
        self._blocks.append({"event": "block", **block})
        self._log.add("block", **block)

    def _drain(self, step: Step) -> None:
        """Wait until the tier writes no more."""
        (name,) = step.servers
        root = self._places.root_of(name)
        assert root is not None
        begin_s = time.monotonic()
        seen: list[tuple[int, int]] = []
        while len(seen) < DRAINED_AFTER or len(set(seen[-DRAINED_AFTER:])) > 1:
            if time.monotonic() - begin_s > DRAIN_S:
                raise StorageError(f"{name} still writes after {DRAIN_S:g} s", path=str(root))
            seen.append(_weigh(root))
            time.sleep(0.5)
        files, num_bytes = seen[-1]
        tokens = len(self._sent[name]) * self._context_tokens
        wait_s = round(time.monotonic() - begin_s, 3)
        self._log.add("drained", server=name, files=files, bytes=num_bytes, tokens=tokens, wait_s=wait_s)

    def _stop(self, step: Step) -> None:
        for name in step.servers:
            self._servers[name].begin_stop()
        for name in step.servers:
            self._log.add("server_stopped", **self._servers.pop(name).stop())

    def _drop(self, step: Step) -> None:
        (name,) = step.servers
        root = self._places.root_of(name)
        assert root is not None
        self._log.add("dropped", server=name, **drop_page_cache(root))

    def _throttle(self, _step: Step) -> None:
        """Limit the baseline to a share of what the candidate was seen to read with in its blocks so far."""
        found = read_blocks(self._blocks)
        rates = [
            block.read_bytes_s
            for phase in (NOISE, RESTART)
            for block in of(found, phase, REWARM)
            if block.read_bytes_s is not None
        ]
        if not rates:
            raise StorageError("the candidate was not seen to read: nothing to limit the baseline to")
        observed = sorted(rates)[len(rates) // 2]
        self._limit_bytes_s = observed * self._plan.baseline.throttle
        self._log.add("throttled", candidate_bytes_s=observed, limit_bytes_s=self._limit_bytes_s)

    def _wait_idle(self) -> None:
        """Wait until no server computes: a vLLM worker spins for a second after its last step."""
        deadline_s = time.monotonic() + IDLE_WAIT_S
        used_s = [math.inf]
        while time.monotonic() < deadline_s:
            used_s.append(sum(server.cpu_s() for server in self._servers.values()))
            if abs(used_s[-1] - used_s[-2]) < IDLE_CORES * IDLE_LOOK_S:
                break
            time.sleep(IDLE_LOOK_S)

    def _set_limit(self, bytes_s: float) -> None:
        if is_throttled(self._plan):
            self._places.limit_file.write_text(f"{bytes_s:.0f}", encoding="ascii")

    def _reset(self, name: str) -> None:
        """Empty the device's prefix cache, and the host memory of vLLM's own tier."""
        self._servers[name].client.reset_prefix_cache(external=name == FS)

    def _prompts(self, step: Step) -> list[tuple[int, list[int]]]:
        name, load = server_of(step.arm), self._plan.load
        if step.phase == CANARY:
            return [(0, prompts.context(self._seed, prompts.CANARY, 0, self._context_tokens // CANARY_PART))]
        first = step.group * load.concurrency
        return [self._prompt(name, prompts.FILL, first + index) for index in range(load.concurrency)]

    def _prompt(self, name: str, kind: str, number: int) -> tuple[int, list[int]]:
        self._sent.setdefault(name, set()).add((kind, number))
        return number, prompts.context(self._seed, kind, number, self._context_tokens)


def _weigh(root: Path) -> tuple[int, int]:
    """Files under a root and their bytes."""
    sizes = []
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):  # renamed meanwhile: the next look counts it
            if path.is_file():
                sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def _in_words(step: Step) -> str:
    if step.kind == "block":
        computes = "compute" if step.arm == RECOMPUTE else step.phase
        return f"{step.arm}: {computes}" + (f", pair {step.pair + 1}" if step.phase == "recover" else "")
    return " ".join((step.kind, *step.servers))
