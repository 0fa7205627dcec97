"""One side of a comparison on a real vLLM: cold contexts recovered by one tier, or computed. One process a side.

    python bench/vllm_cold.py rewarm --root /mnt/nvme0/kv --out rewarm.jsonl --answers answers.json

It serves distinct contexts of a model of random weights, so that their KV is stored; then, in each round, it makes the
server forget device and host memory, drops the page cache, and serves the first context alone, all of them at once,
and, with --decode, all of them while another request is decoding. Each line of --out is one reading. Tokens are checked
against those in --answers, which the first side of a comparison writes: run ``compute`` first. Only root can drop the
page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPES = {  # hidden, layers, heads, KV heads, intermediate, size of a head
    "32b": (5120, 64, 40, 8, 27648, 128),
    "14b": (5120, 48, 40, 8, 13824, 128),
    "8b": (4096, 32, 32, 8, 14336, 128),
    "tiny": (256, 4, 8, 4, 512, 32),
}
SIDES = ("compute", "fs", "host", "lmcache", "rewarm")
VOCABULARY = 32_000
CHUNK_TOKENS = 256
"""Of the peers; LMCache's default."""
DECODED_TOKENS = 600
SETTLE_S = 3.0
SETTLE_LIMIT_S = 90.0


@dataclass
class Served:
    """What one request got."""

    asked: float
    times: list[float] = field(default_factory=list)
    """When each token came."""
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0


def main() -> None:
    """See the head of this file."""
    args = parse()
    side = Side(args)
    readings: list[dict[str, Any]] = []
    with Path(args.out).open("a", encoding="utf-8") as out:

        def note(**reading: Any) -> None:
            readings.append(reading)
            line = json.dumps({"side": args.side, "label": args.label, **reading})
            out.write(line + "\n")
            out.flush()
            print(line, flush=True)

        note(what="start", seconds=side.start_s, shape=args.shape, tokens=args.tokens, settings=args.settings)
        if not args.keep:
            note(what="fill", **side.fill())
        for number in range(args.rounds):
            if args.single:
                note(what="x1", round=number, **side.recover(1))
            if args.at_once:
                note(what=f"x{args.at_once}", round=number, **side.recover(args.at_once))
            if args.decode:
                note(what="decode", round=number, **side.recover(args.at_once, beside_decode=True))
    if not all(reading.get("same", True) for reading in readings):
        sys.exit("tokens differ from those in --answers")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--root", default="", help="where the tier keeps its files")
    parser.add_argument("--out", required=True, help="JSON lines are added to this file")
    parser.add_argument("--answers", default="", help="tokens of the first side; written where it is missing")
    parser.add_argument("--label", default="", help="kept with each reading")
    parser.add_argument("--shape", choices=SHAPES, default="32b")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=4, help="0: single contexts only")
    parser.add_argument("--single", type=int, default=1, help="0: no single context")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", action="store_true", help="recover beside a request that decodes, too")
    parser.add_argument("--keep", action="store_true", help="what --root holds is used: contexts are not served first")
    parser.add_argument("--host-gib", type=float, default=24.0, help="host memory of the peers")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: Rewarm's settings")
    parser.add_argument("--server", type=json.loads, default={}, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--connector", default="rewarm.adapters.vllm.connector")
    return parser.parse_args()


class Side:
    """A server with one tier, or none."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        os.environ.setdefault("PYTHONHASHSEED", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        model = write_model(args.shape)
        transfer = TRANSFERS[args.side](args)
        started = time.perf_counter()
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=args.tokens + 1024,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.85,
            kv_cache_dtype=args.kv_dtype,
            enable_prefix_caching=True,
            disable_log_stats=False,
            **({"kv_transfer_config": transfer} if transfer else {}),
            **args.server,
        )
        self.start_s = round(time.perf_counter() - started, 1)
        self._params: Callable[[int], Any] = lambda num_tokens: SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._numbers = iter(range(1 << 30))
        draw = random.Random(7)
        self._contexts = [[draw.randrange(3, VOCABULARY - 1) for _ in range(args.tokens)] for _ in range(args.contexts)]
        warm = [draw.randrange(3, VOCABULARY - 1) for _ in range(args.tokens)]
        self._decoded = [draw.randrange(3, VOCABULARY - 1) for _ in range(128)]
        self._answers: list[list[int]] = []
        if args.answers and Path(args.answers).exists():
            self._answers = json.loads(Path(args.answers).read_text(encoding="utf-8"))
        self._serve([warm])

    def fill(self) -> dict[str, Any]:
        """Serve all contexts at once, so that they are stored; and wait until the tier has written them."""
        started = time.perf_counter()
        served = self._serve(self._contexts)
        seconds = time.perf_counter() - started
        if not self._answers:
            self._answers = [one.tokens for one in served]
            if self._args.answers:
                Path(self._args.answers).write_text(json.dumps(self._answers), encoding="utf-8")
        stored_bytes, settled_s = self._settle()
        return {
            **self._figures(served, started),
            "seconds": seconds,
            "stored_bytes": stored_bytes,
            "settled_s": settled_s,
        }

    def _settle(self) -> tuple[int, float]:
        """Bytes below the root once they no longer change, and the seconds until then."""
        started = changed = time.perf_counter()
        size = -1
        while time.perf_counter() - changed < SETTLE_S and time.perf_counter() - started < SETTLE_LIMIT_S:
            now = tree_bytes(self._args.root) if self._args.root else 0
            if now != size:
                size, changed = now, time.perf_counter()
            time.sleep(0.5)
        return size, round(changed - started, 1)

    def recover(self, num_contexts: int, *, beside_decode: bool = False) -> dict[str, Any]:
        """Forget, drop the page cache, serve the first contexts at once."""
        # The host tier itself must stay where it is what is measured.
        forgets_tier = self._args.side == "fs"
        self._llm.reset_prefix_cache(reset_connector=forgets_tier)
        if self._args.root:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        contexts = self._contexts[:num_contexts] if num_contexts == 1 else self._contexts[-num_contexts:]
        decoded = Served(0.0)
        started = time.perf_counter()
        served = self._serve(contexts, decoded if beside_decode else None)
        figures = self._figures(served, started if not beside_decode else served[0].asked)
        if beside_decode:
            begin, end = served[0].asked, max(one.times[0] for one in served)
            times = [t for t in decoded.times if t >= begin]
            figures["gaps_ms"] = [round((b - a) * 1000, 2) for a, b in itertools.pairwise(times) if a <= end]
            calm = [t for t in decoded.times if t < begin]
            figures["calm_gaps_ms"] = [round((b - a) * 1000, 2) for a, b in itertools.pairwise(calm)]
        if self._answers:
            first = 0 if num_contexts == 1 else len(self._contexts) - num_contexts
            figures["same"] = [one.tokens for one in served] == self._answers[first : first + num_contexts]
        return figures

    def _serve(self, contexts: Sequence[Sequence[int]], decoded: Served | None = None) -> list[Served]:
        """All contexts at once; beside a request that has decoded 40 tokens by then, if one is asked for."""
        engine = self._llm.llm_engine
        running: dict[str, Served] = {}
        if decoded is not None:
            name = self._add(self._decoded, DECODED_TOKENS)
            running[name] = decoded
            decoded.asked = time.perf_counter()
            while len(decoded.times) < 40:
                self._step(engine, running)
        served = []
        for context in contexts:
            one = Served(time.perf_counter())
            running[self._add(context, self._args.output_tokens)] = one
            served.append(one)
        while not all(len(one.tokens) >= self._args.output_tokens for one in served):
            self._step(engine, running)
        if decoded is not None:
            engine.abort_request([name])
        while engine.has_unfinished_requests():
            self._step(engine, running)
        return served

    def _add(self, tokens: Sequence[int], num_output_tokens: int) -> str:
        name = f"r{next(self._numbers)}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, self._params(num_output_tokens))
        return name

    @staticmethod
    def _step(engine: Any, running: dict[str, Served]) -> None:
        for output in engine.step():
            one = running[output.request_id]
            new = output.outputs[0].token_ids
            one.tokens.extend(new)
            one.times.extend([time.perf_counter()] * len(new))
            one.num_cached = output.num_cached_tokens or one.num_cached

    @staticmethod
    def _figures(served: Sequence[Served], started: float) -> dict[str, Any]:
        return {
            "ttft_s": [round(one.times[0] - started, 4) for one in served],
            "wall_s": round(max(one.times[-1] for one in served) - started, 4),
            "cached": [one.num_cached for one in served],
        }


def write_model(shape: str) -> str:
    """A directory with the configuration of a Llama of this shape; its weights are random."""
    hidden, layers, heads, kv_heads, intermediate, head = SHAPES[shape]
    path = Path(f"/tmp/model-{shape}")
    path.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": intermediate,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def _offload(args: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "block_size": CHUNK_TOKENS}
    extra["cpu_bytes_to_use"] = int(args.host_gib * 2**30)
    if args.side == "fs":
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": args.root}]
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _lmcache(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.update(
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_LOCAL_CPU="False",
        LMCACHE_MAX_LOCAL_CPU_SIZE=str(args.host_gib),
        LMCACHE_LOCAL_DISK=f"file://{args.root}/",
        LMCACHE_MAX_LOCAL_DISK_SIZE="60",
    )
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def _rewarm(args: argparse.Namespace) -> dict[str, Any]:
    if not (Path(args.root) / "rewarm.volume").exists():
        os.makedirs(Path(args.root).parent, exist_ok=True)
        size = f"{shutil.disk_usage(Path(args.root).parent).free * 9 // 10 >> 30}GiB"
        command = [sys.executable, "-m", "rewarm.cli.main", "volume", "create", args.root, "--size", size]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {
        "kv_connector": "RewarmConnector",
        "kv_connector_module_path": args.connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"roots": [args.root], **args.settings},
    }


TRANSFERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "compute": lambda _: {},
    "fs": _offload,
    "host": _offload,
    "lmcache": _lmcache,
    "rewarm": _rewarm,
}


def tree_bytes(path: str) -> int:
    """Bytes of all files below a directory."""
    total = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                total += os.lstat(os.path.join(where, name)).st_size
    return total


if __name__ == "__main__":
    main()
