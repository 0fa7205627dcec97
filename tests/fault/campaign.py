"""The fault campaign: injects each dealt case into real files below a real server half, and judges what was served."""

from __future__ import annotations

import errno
import random
import shutil
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from faultlist import Case, Effect, Fault, Phase, Record
from faultshim import Action, Op, Shim

if TYPE_CHECKING:
    from pathlib import Path

    from zygote import Job, Zygote

FRESH_ROOT_EVERY = 200
"""Cases after which the campaign starts on an empty root, so that it needs little room."""
OWN_ROOT = (Phase.KILL_EVICT, Phase.KILL_IMPORT)
"""Cases that change the whole root, and so have one of their own."""
KILLS = (Action.KILL_BEFORE, Action.KILL_AFTER, Action.KILL_MID)


@dataclass
class Outcome:
    """What one load gave."""

    good: int
    """Chunks served, from the first on."""
    wrong: int
    """Blocks among them with a byte that their key does not demand."""
    damaged: int = 0
    """By how much the counter of damaged records rose."""
    io_errors: int = 0
    """By how much the counter of I/O errors rose."""


@dataclass
class Row:
    """One case, told."""

    case: int
    fault: str
    fired: bool = False
    chunks: int = 0
    victim: int = 0
    good: int = 0
    wrong: int = 0
    wrong_again: int = 0
    damaged: int = 0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


class Subject(Protocol):
    """What is under test: a server with a storage tier, in as many lives as a case needs."""

    name: str
    counts: bool
    """Whether it counts damage and I/O errors."""
    stores_what_it_computes: bool
    """Whether a load of a damaged chunk ends with a store of the same."""
    record_infix: str
    """What the name of a record holds that is being written or is whole, and no other file's name."""

    def applies(self, fault: Fault) -> bool:
        """Whether this format or product has the thing that the fault strikes."""

    def twin(self) -> Subject:
        """Another one like this, for a root of its own."""

    def begin(self, root: Path) -> None:
        """Start on an empty root."""

    def expect_full(self) -> None:
        """From now on the root may be full: let run what makes room."""

    def reopen(self) -> None:
        """A restart: new objects over the same files."""

    def prompt(self, rng: random.Random) -> Any:
        """A prompt that nobody asked before, of 2 to 5 chunks."""

    def chunks(self, prompt: Any) -> int:
        """Chunks of a prompt."""

    def store(self, prompt: Any) -> None:
        """Serve it once and wait until its chunks are stored, or given up."""

    def store_as_stranger(self, prompt: Any) -> None:
        """The same prompt, stored by a server of another model on the same root."""

    def load(self, prompt: Any) -> Outcome:
        """Forget what is in memory and serve it again."""

    def record(self, prompt: Any, index: int, sibling: int) -> Record:
        """The file of chunk ``index``."""

    def make_archive(self, prompt: Any) -> None:
        """Store a prompt, export it, and start anew on an empty root."""

    def job(self, name: str, prompt: Any) -> tuple[Job, tuple[Any, ...]]:
        """A function for a child process, with its arguments: "store", "evict" or "import"."""

    def untidy(self) -> list[str]:
        """What does not belong on the root, once all lives and the janitor's pass are over."""

    def end(self) -> None:
        """Stop."""


class Campaign:
    """Runs cases on one subject."""

    def __init__(self, subject: Subject, folder: Path, shim: Shim | None, zygote: Zygote | None) -> None:
        self.subject = subject
        """Of the case that runs: the one on the shared root, or a twin."""
        self.root = folder
        """Of the case that runs."""
        self.folder = folder
        self.shim = shim
        self.zygote = zygote
        self._shared = subject
        self._root_number = -1
        self._steps: dict[tuple[Phase, Op], int] = {}
        self._told: list[str] = []

    def run(self, case: Case) -> Row | None:
        """One case; None where it does not apply, or needs the shim and there is none."""
        fault = case.fault
        if not self._shared.applies(fault) or (fault.phase is not Phase.AT_REST and self.shim is None):
            return None
        row = Row(case.number, fault.name)
        self._told = row.story
        started = time.monotonic()
        try:
            if fault.phase in OWN_ROOT:
                self._begin(self._shared.twin(), self.folder / "own")
            else:
                self._share_root(case.number)
            self._phase(case, row)
        except Exception as error:  # noqa: BLE001 - an exception out of a storage fault is a finding of its own
            row.complaints.append(f"raised {type(error).__name__}: {error}")
            row.story.append(traceback.format_exc())
        if self.shim:
            self.shim.disarm()
        if self.subject is not self._shared:
            self._end()
        elif row.complaints:  # what is wrong there must not show in the next case again
            self.close()
        row.seconds = round(time.monotonic() - started, 3)
        return row

    def close(self) -> None:
        """Stop what runs on the shared root, and remove that."""
        if self._root_number >= 0:
            self.subject, self.root = self._shared, self.folder / f"root{self._root_number}"
            self._end()
            self._root_number = -1

    def _phase(self, case: Case, row: Row) -> None:
        if case.fault.phase is Phase.AT_REST:
            self._at_rest(case, row)
        elif case.fault.phase is Phase.LOAD:
            self._in_load(case, row)
        elif case.fault.phase is Phase.STORE:
            self._in_store(case, row)
        else:
            self._kill(case, row)

    def _share_root(self, number: int) -> None:
        wanted = number // FRESH_ROOT_EVERY
        root = self.folder / f"root{wanted}"
        if wanted == self._root_number:
            self.subject, self.root = self._shared, root
            return
        self.close()
        self._begin(self._shared, root)
        self._root_number = wanted

    def _begin(self, subject: Subject, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        self.subject, self.root = subject, root
        subject.begin(root)

    def _end(self) -> None:
        with suppress(Exception):  # a case that failed may have left it unusable, and has said so
            self.subject.end()
        shutil.rmtree(self.root)

    # Phases

    def _at_rest(self, case: Case, row: Row) -> None:
        rng, subject = case.rng(), self.subject
        prompt, victim, sibling = self._stored_prompt(rng, row)
        if case.fault.name == "alien-namespace":
            subject.store_as_stranger(prompt)
        assert case.fault.damage
        case.fault.damage(rng, subject.record(prompt, victim, sibling))
        row.fired = True
        restart = rng.random() < 0.3
        row.story.append(f"damaged chunk {victim} of {row.chunks}, sibling {sibling}, restart: {restart}")
        if restart:
            subject.reopen()
        struck = [victim, sibling] if case.fault.name == "swap" else [victim]
        self._judge_load(case, row, prompt, struck)
        if case.fault.needs_janitor:
            subject.reopen()  # its log is written then
            row.complaints += subject.untidy()
        self._judge_healed(row, prompt)

    def _in_load(self, case: Case, row: Row) -> None:
        rng, subject = case.rng(), self.subject
        prompt, victim, sibling = self._stored_prompt(rng, row)
        order = case.fault.order
        assert order
        assert self.shim
        path = subject.record(prompt, victim, sibling).path
        if rng.random() < 0.3:
            subject.reopen()
        self.shim.arm(
            order.action, order.ops, str(path), times=order.times, error=order.error, random=rng.getrandbits(31)
        )
        self._judge_load(case, row, prompt, [victim])
        self.shim.disarm()
        row.fired = self.shim.fired > 0
        row.story += [f"shim saw {self.shim.seen}, struck {self.shim.fired}", *self.shim.log()]
        if case.fault.effect is Effect.ERROR:
            subject.reopen()  # a root that failed is left alone for a while
        self._judge_healed(row, prompt)

    def _in_store(self, case: Case, row: Row) -> None:
        rng, subject = case.rng(), self.subject
        order = case.fault.order
        assert order
        assert self.shim
        limit = self._count_steps(case.fault.phase, order.ops)
        if order.error == errno.ENOSPC:
            subject.expect_full()
        prompt = subject.prompt(rng)
        row.chunks = subject.chunks(prompt)
        nth = rng.randint(1, limit)
        self.shim.arm(
            order.action, order.ops, str(self.root), nth=nth, times=order.times, error=order.error,
            random=rng.getrandbits(31), infix=self._infix(order.ops),
        )  # fmt: skip
        subject.store(prompt)
        self.shim.disarm()
        row.fired = self.shim.fired > 0
        row.story += [f"operation {nth} of about {limit}", *self.shim.log()]
        if rng.random() < 0.5:
            subject.reopen()
        outcome = subject.load(prompt)
        self._take(row, outcome)
        if case.fault.effect is Effect.HARMLESS and outcome.good != row.chunks:
            row.complaints.append(f"served {outcome.good} of {row.chunks} chunks after a harmless fault")
        if subject.counts and case.fault.effect is not Effect.DAMAGE and outcome.damaged:
            row.complaints.append(f"counted {outcome.damaged} damaged records, none was stored damaged")
        subject.reopen()
        self._judge_healed(row, prompt)
        row.complaints += subject.untidy()

    def _kill(self, case: Case, row: Row) -> None:
        rng, subject = case.rng(), self.subject
        assert self.shim
        assert self.zygote
        name = {Phase.KILL_STORE: "store", Phase.KILL_EVICT: "evict", Phase.KILL_IMPORT: "import"}[case.fault.phase]
        limit = self._count_steps(case.fault.phase, Op.CHANGE)
        prompt = subject.prompt(rng)
        row.chunks = subject.chunks(prompt)
        self._prepare(name, prompt)
        nth, action = rng.randint(1, limit), rng.choice(KILLS)
        died = self._child(name, prompt, action, nth)
        row.fired = died
        row.story += [f"{action.name} at operation {nth} of about {limit}"]
        for life in ("the server that ran on", "a new server"):
            outcome = subject.load(prompt)
            self._take(row, outcome)
            if subject.counts and (outcome.damaged or outcome.io_errors):
                row.complaints.append(f"{life} counted {outcome.damaged} damaged, {outcome.io_errors} I/O errors")
            subject.reopen()
        if name == "import":
            self._child(name, prompt, Action.COUNT, 1)
            subject.reopen()
            outcome = subject.load(prompt)
            self._take(row, outcome)
            if outcome.good != row.chunks:
                row.complaints.append(f"imported again, but {outcome.good} of {row.chunks} chunks are served")
        self._judge_healed(row, prompt)
        row.complaints += subject.untidy()

    # Helpers

    def _prepare(self, name: str, prompt: Any) -> None:
        """What an action needs before it starts: an eviction something to evict, an import an archive."""
        if name == "evict":
            self.subject.store(prompt)
        elif name == "import":
            self.subject.make_archive(prompt)

    def _stored_prompt(self, rng: random.Random, row: Row) -> tuple[Any, int, int]:
        prompt = self.subject.prompt(rng)
        row.chunks = self.subject.chunks(prompt)
        self.subject.store(prompt)
        row.victim = victim = rng.randrange(row.chunks)
        return prompt, victim, (victim + rng.randint(1, row.chunks - 1)) % row.chunks

    def _take(self, row: Row, outcome: Outcome) -> None:
        row.good, row.damaged = outcome.good, row.damaged + outcome.damaged
        row.wrong += outcome.wrong
        if outcome.wrong:
            row.complaints.append(f"{outcome.wrong} WRONG blocks served")
        row.story.append(str(outcome))

    def _judge_load(self, case: Case, row: Row, prompt: Any, struck: list[int]) -> None:
        outcome = self.subject.load(prompt)
        self._take(row, outcome)
        effect = case.fault.effect
        fired = case.fault.phase is Phase.AT_REST or (self.shim is not None and self.shim.fired > 0)
        want = row.chunks if effect is Effect.HARMLESS or not fired else min(struck)
        if outcome.good != want:
            row.complaints.append(f"served {outcome.good} chunks, {want} of {row.chunks} are good")
        damaged = len(struck) if effect is Effect.DAMAGE and fired else 0
        if self.subject.counts and outcome.damaged != damaged:
            row.complaints.append(f"counted {outcome.damaged} damaged records, {damaged} were")
        errors = 1 if effect is Effect.ERROR and fired else 0
        if case.fault.needs_janitor and self.subject.stores_what_it_computes:
            errors += 1  # the store over what cannot be written over
        if self.subject.counts and outcome.io_errors != errors:
            row.complaints.append(f"counted {outcome.io_errors} I/O errors, there was {errors}")

    def _judge_healed(self, row: Row, prompt: Any) -> None:
        """The recomputed chunks are stored again, and served: a fault costs one miss, not the place for ever."""
        self.subject.store(prompt)
        outcome = self.subject.load(prompt)
        row.story.append(f"once more: {outcome}")
        row.wrong_again += outcome.wrong
        if outcome.wrong:
            row.complaints.append(f"{outcome.wrong} WRONG blocks served after the chunks were stored again")
        if outcome.good != row.chunks:
            row.complaints.append(f"stored again, but {outcome.good} of {row.chunks} chunks are served")
        if self.subject.counts and (outcome.damaged or outcome.io_errors):
            row.complaints.append(f"stored again, but {outcome} counts faults")

    def _infix(self, ops: Op) -> str:
        """Writes are struck in records alone: a lie about any other file (a log, say) is not this list's business."""
        return self.subject.record_infix if ops is Op.WRITE else ""

    def _count_steps(self, phase: Phase, ops: Op) -> int:
        """Operations of one such action when nothing goes wrong, counted once per campaign."""
        if (phase, ops) not in self._steps:
            assert self.shim
            prompt = self.subject.prompt(random.Random(f"steps {phase.name} {ops}"))
            if phase is Phase.STORE:
                self.shim.arm(Action.COUNT, ops, str(self.root), infix=self._infix(ops))
                self.subject.store(prompt)
                seen = self.shim.seen
                self.shim.disarm()
            else:
                name = phase.name.removeprefix("KILL_").lower()
                self._prepare(name, prompt)
                self._child(name, prompt, Action.COUNT, 1)
                seen = self._child_seen
            self._steps[phase, ops] = max(1, seen)
        return self._steps[phase, ops]

    def _child(self, name: str, prompt: Any, action: Action, nth: int) -> bool:
        """Run a job in a child; whether the shim killed it."""
        assert self.zygote
        control = self.folder / "child.shim"
        orders = Shim(control)
        orders.arm(action, Op.CHANGE, str(self.root), nth=nth)
        job, args = self.subject.job(name, prompt)
        death = self.zygote.run(job, *args, control=control)
        self._child_seen = orders.seen
        self._told += orders.log()
        if not death.as_expected:
            raise AssertionError(f"the child that runs {name} ended with {death.exit_code}")
        return death.killed
