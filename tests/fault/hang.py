"""A root that hangs: every file operation below it stops returning, and the server has to go on answering.

Runs under the shim: test_hang.py starts it, or by hand::

    python tests/fault/run.py --hang 60

Prints one JSON object: requests answered while the root hung, wrong blocks among them, the slowest call into the
connector on the scheduler's side and on the rank's, and whether the root served again afterwards.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from faultshim import Action, Op, Shim
from mini_server import CHUNK_TOKENS
from subject_rewarm import Server, make_config
from subject_volume import share_one_janitor

from rewarm.volume import create_volume

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIN_REQUESTS = 20
ANSWER_LIMIT_S = 120
"""A server that has not answered one request by then hangs too: the program ends, and says where it stood."""


class _Timed:
    """A side of the connector whose calls are timed."""

    def __init__(self, side: Any, slowest: dict[str, float]) -> None:
        self._side = side
        self._slowest = slowest

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._side, name)
        return self._timed(name, found) if callable(found) else found

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._slowest[name] = max(self._slowest[name], time.perf_counter() - started)

        return timed


def run(folder: Path, shim: Shim, seconds: float, *, broken: bool) -> int:
    """0 when every request was answered rightly while the root hung, and served again when it no longer did.

    Args:
        folder: Where the root and the model lie.
        shim: Makes it hang.
        seconds: How long, at least.
        broken: The scheduler's side looks at the root itself, which is to be seen.
    """
    share_one_janitor()
    rng = random.Random(1)
    root = folder / "root"
    create_volume([str(root)], capacity_bytes=64 << 20)
    config = make_config(folder, root, "threads", "model", load_deadline_s=0.5)
    server = Server(config, "model")
    stored = [_prompt(rng) for _ in range(4)]
    for prompt in stored:
        server.serve(prompt)
    slowest: dict[str, dict[str, float]] = {"scheduler": defaultdict(float), "rank": defaultdict(float)}
    connector, worker = server.mini.scheduler.connector, server.mini.worker
    server.mini.scheduler.connector = _Timed(connector, slowest["scheduler"])
    server.mini.worker = _Timed(worker, slowest["rank"])
    if broken:
        connector.get_num_new_matched_tokens = _looks_first(connector.get_num_new_matched_tokens, root)
    shim.arm(Action.HANG, Op.ANY, str(root), times=0)
    started = time.monotonic()
    answered = wrong = given_up = 0
    while answered < MIN_REQUESTS or time.monotonic() - started < seconds:
        faulthandler.dump_traceback_later(5 if broken else ANSWER_LIMIT_S, exit=True)
        server.mini.forget_device_cache()
        prompt = rng.choice(stored) if answered % 2 else _prompt(rng)
        (served,) = server.mini.run([prompt])
        answered += 1
        wrong += served.wrong_blocks
        given_up += served.failed_blocks > 0
    faulthandler.cancel_dump_traceback_later()
    hung, hung_s = shim.hanging, time.monotonic() - started
    shim.disarm()
    server.mini.scheduler.connector, server.mini.worker = connector, worker
    server.mini.drain(lambda: not shim.hanging and not server.scheduler._scheduler._stores, "the stores that hung")
    server.close()
    server = Server(config, "model")
    again = [server.serve(prompt) for prompt in stored]
    server.close()
    report = {
        "hung_s": round(hung_s, 1), "operations_hung_at_the_end": hung, "answered": answered,
        "loads_given_up": given_up,
        "wrong_blocks": wrong + sum(served.wrong_blocks for served in again),
        "served_again": all(served.good_blocks == served.num_prompt_blocks for served in again),
        "slowest_call_ms": {side: _slowest(calls) for side, calls in slowest.items()},
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 0 if hung and not report["wrong_blocks"] and report["served_again"] else 1


def _looks_first(call: Callable[..., Any], root: Path) -> Callable[..., Any]:
    def looks_first(*args: Any) -> Any:
        os.stat(root / "rewarm.volume")
        return call(*args)

    return looks_first


def _prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(3, 500), k=rng.randint(2, 5) * CHUNK_TOKENS + 1)


def _slowest(calls: dict[str, float]) -> dict[str, float]:
    name = max(calls, key=lambda call: calls[call])
    return {name: round(1000 * calls[name], 1)}
