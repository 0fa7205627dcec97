"""A model server of 100 lines: what the trial asks of vLLM, with files for a tier, in no time.

Run as a program with the arguments that `vllm serve` gets. Its tier is a folder with one file a context.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--port", type=int)
parser.add_argument("--host")
parser.add_argument("--served-model-name")
parser.add_argument("--kv-transfer-config")
options, _ = parser.parse_known_args()
fault = os.environ.get("FAKE_FAULT", "")
tier = Path(json.loads(options.kv_transfer_config)["root"]) if options.kv_transfer_config else None
counters = dict.fromkeys(("external_prefix_cache_hits", "prefix_cache_hits", "prompt_tokens", "request_success"), 0)
lock = threading.Lock()

if fault == "dies":
    sys.exit("RuntimeError: Error: no such model")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": options.served_model_name}]}))
        elif self.path == "/metrics":
            lines = [f'vllm:{name}_total{{engine="0"}} {value}.0' for name, value in counters.items()]
            self.answer("# HELP x\n" + "\n".join(lines) + "\n")
        else:
            self.answer("")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/reset_prefix_cache"):
            self.answer(json.dumps({"success": True}))
            return
        request = json.loads(body)
        prompt = request["prompt"]
        if fault == "refuses" and len(prompt) > 100:
            self.answer('{"error": "too long"}', 400)
            return
        digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
        file = tier / f"{digest.hex()}.bin" if tier else None
        hit = bool(file and file.exists())
        if file and hit:
            with lock:
                counters["external_prefix_cache_hits"] += len(prompt)
        elif file:
            file.write_bytes(digest * len(prompt))
        self.send_response(200)
        self.end_headers()
        for index in range(request["max_tokens"]):
            token = digest[index] + (fault == "wrong" and hit)
            self.event({"choices": [{"token_ids": [token]}]})
        with lock:
            counters["prompt_tokens"] += len(prompt)
            counters["request_success"] += 1
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, piece: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")


server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
if fault == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if fault == "leaks":
    import mmap

    path = Path(f"/dev/shm/rewarm-fake-{os.getpid()}")
    path.write_bytes(bytes(4096))
    with path.open("r+b") as shared:
        kept = mmap.mmap(shared.fileno(), 4096)
left_behind = socket.socket(socket.AF_UNIX)
left_behind.bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")  # as vLLM's sockets are, whose names stay
if fault == "slow start":
    time.sleep(3600)
server.serve_forever()
