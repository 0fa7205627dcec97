"""The client: streaming completions, all of a block at once, and what the server counts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

import httpx

from rewarm.errors import StorageError

COUNTERS = {
    "external_hits": "vllm:external_prefix_cache_hits_total",
    "external_queries": "vllm:external_prefix_cache_queries_total",
    "device_hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "answered": "vllm:request_success_total",
}
"""Our names of the server's counters, summed over their labels."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


Prompt: TypeAlias = "tuple[int, list[int]]"
"""(context number, token numbers)."""


class Client:
    """Talks to one server.

    Args:
        url: Its address, like ``http://127.0.0.1:8000``.
        model: The name it serves under.
        timeout_s: After which a request counts as failed.
    """

    def __init__(self, url: str, model: str, timeout_s: float = 1200.0) -> None:
        self._url = url
        self._model = model
        self._timeout = httpx.Timeout(timeout_s, connect=5.0)

    def complete(self, prompts: Sequence[Prompt], output_tokens: int) -> tuple[list[dict[str, Any]], float]:
        """Send prompts all at once and wait for every answer.

        Args:
            prompts: (context number, token numbers) each.
            output_tokens: Asked for, whatever the model would say of its end.
        Returns:
            One record a prompt, in order (context, prompt_tokens, ttft_s, total_s, tokens, error), and the seconds
            from the first request sent to the last answer's end. An error is text in its record, never raised.
        """
        return asyncio.run(self._complete(prompts, output_tokens))

    async def _complete(self, prompts: Sequence[Prompt], output_tokens: int) -> tuple[list[dict[str, Any]], float]:
        bodies = [json.dumps(self._body(tokens, output_tokens)) for _, tokens in prompts]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=self._timeout, limits=limits, trust_env=False) as http:
            begin = time.perf_counter()
            answers = await asyncio.gather(*(_stream(http, body) for body in bodies))
            wall_s = time.perf_counter() - begin
        records = [
            {"context": context, "prompt_tokens": len(tokens), **answer}
            for (context, tokens), answer in zip(prompts, answers, strict=True)
        ]
        return records, wall_s

    def _body(self, tokens: list[int], output_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def is_up(self) -> bool:
        """Whether it answers that it is healthy."""
        try:
            answer = httpx.get(f"{self._url}/health", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return bool(answer.status_code == 200)

    def models(self) -> list[str]:
        """Names it serves under."""
        return [model["id"] for model in self._get("/v1/models").json()["data"]]

    def counters(self) -> dict[str, float]:
        """The counters named in COUNTERS that this server has."""
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(self._get("/metrics").text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return {ours: sums[theirs] for ours, theirs in COUNTERS.items() if theirs in sums}

    def counters_after(self, before: Mapping[str, float], answers: int, wait_s: float = 5.0) -> dict[str, float]:
        """What was counted since ``before``, once the server has counted so many answers; at most ``wait_s`` later."""
        deadline = time.monotonic() + wait_s
        while True:
            grown = {name: value - before.get(name, 0.0) for name, value in self.counters().items()}
            if grown.get("answered", answers) >= answers or time.monotonic() > deadline:
                return grown
            time.sleep(0.05)

    def reset_prefix_cache(self, *, external: bool, wait_s: float = 30.0) -> None:
        """Empty the device's prefix cache; blocks that a store still reads are waited for.

        Args:
            external: Ask the connector to empty its own too: vLLM's tier drops its host memory and keeps its files.
            wait_s: How long the server may refuse.
        Raises:
            StorageError: The server kept its blocks, or has no such call.
        """
        deadline = time.monotonic() + wait_s
        while True:
            answer = self._post("/reset_prefix_cache", {"reset_external": "true"} if external else {})
            if not answer.content or answer.json().get("success", True):
                return
            if time.monotonic() > deadline:
                raise StorageError(f"{self._url} did not empty its prefix cache within {wait_s:g} s")
            time.sleep(0.1)

    def _get(self, path: str) -> httpx.Response:
        return self._checked(lambda: httpx.get(f"{self._url}{path}", timeout=30.0, trust_env=False))

    def _post(self, path: str, query: Mapping[str, str]) -> httpx.Response:
        return self._checked(lambda: httpx.post(f"{self._url}{path}", params=query, timeout=60.0, trust_env=False))

    def _checked(self, ask: Any) -> httpx.Response:
        try:
            answer: httpx.Response = ask()
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise StorageError(f"{self._url} does not answer: {error}") from error
        return answer


async def _stream(http: httpx.AsyncClient, body: str) -> dict[str, Any]:
    """One streamed completion; the first token's time is that of the first piece that carries a token."""
    begin = time.perf_counter()
    tokens: list[int] = []
    ttft_s, error = 0.0, ""
    try:
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
            if answer.status_code != 200:
                error = f"HTTP {answer.status_code}: {(await answer.aread())[:300].decode(errors='replace')}"
            async for line in _lines(answer):
                piece = _piece(line)
                if "error" in piece:
                    error = str(piece["error"])[:300]
                for choice in piece.get("choices", ()):
                    if choice.get("token_ids") and not tokens:
                        ttft_s = time.perf_counter() - begin
                    tokens += choice.get("token_ids") or ()
    except (httpx.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    total_s = time.perf_counter() - begin
    if not tokens and not error:
        error = "no token came"
    return {"ttft_s": ttft_s, "total_s": total_s, "tokens": tokens, "error": error}


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines that end with LF alone: httpx's own also end at U+0085 and U+2028, which random tokens spell."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _piece(line: bytes) -> dict[str, Any]:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return {}
    piece = json.loads(line[6:])
    return piece if isinstance(piece, dict) else {}
