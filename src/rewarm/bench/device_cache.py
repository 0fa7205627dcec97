"""A KV cache as a server has one, with bytes in it that are known, so that what is loaded can be compared in place.

R requests of N blocks each; block j of request r lies wherever a shuffled order says, as a server's blocks do.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import torch

from rewarm.errors import DamageError, UnsupportedError
from rewarm.kv.planes import PlaneSet, find_planes

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that no two words are alike; and a file system that compresses finds nothing to compress."""
_POISON = -1


class KvCache:
    """L layers of bfloat16 on one device."""

    def __init__(
        self, device: torch.device, *, layers: int, shape: tuple[int, ...], requests: int, request_blocks: int
    ) -> None:
        """
        Args:
            device: Where it lies.
            layers: L.
            shape: Of a block of one layer.
            requests: R, all of whose KV fits at once.
            request_blocks: N.
        Raises:
            UnsupportedError: The device has too little memory.
        """
        self._request_blocks = request_blocks
        spare_blocks = max(1, request_blocks // 8)
        self.num_blocks = requests * request_blocks + spare_blocks
        try:
            caches = {
                f"layers.{number}": torch.zeros((self.num_blocks, *shape), dtype=torch.bfloat16, device=device)
                for number in range(layers)
            }
        except RuntimeError as error:
            raise UnsupportedError(
                f"{device} has too little memory for {requests} requests: {str(error).splitlines()[0]}",
                hint="fewer --requests, --tokens or --layers",
            ) from error
        self.planes: PlaneSet = find_planes(caches, self.num_blocks)
        self._words = [cache.view(torch.int64).view(self.num_blocks, -1) for cache in caches.values()]
        self._order = list(range(self.num_blocks))

    def shuffle(self, seed: int) -> None:
        """Give every block of every request another place; the bytes stay where they are."""
        random.Random(seed).shuffle(self._order)

    def blocks(self, request: int, first: int, count: int) -> array[int]:
        """array('q'): where ``count`` blocks of a request lie, or belong, from its block ``first`` on."""
        begin = request * self._request_blocks + first
        return array("q", self._order[begin : begin + count])

    def paint(self, request: int) -> None:
        """Write a request's KV into its blocks."""
        places = self._places(request)
        for layer, words in enumerate(self._words):
            words[places] = self._expected(request, layer)

    def poison(self) -> None:
        """Write what no request has into every block."""
        for words in self._words:
            words.fill_(_POISON)

    def check(self, requests: Sequence[int]) -> None:
        """Compare the KV of requests with what was painted, and all other blocks with the poison.

        Raises:
            DamageError: A byte differs.
        """
        untouched = torch.ones(self.num_blocks, dtype=torch.bool, device=self.planes.device)
        for request in requests:
            places = self._places(request)
            untouched[places] = False
            for layer, words in enumerate(self._words):
                if not torch.equal(words[places], self._expected(request, layer)):
                    raise DamageError(f"request {request} was loaded with other bytes than were stored, layer {layer}")
        for layer, words in enumerate(self._words):
            if not bool((words == _POISON).all(dim=1)[untouched].all()):
                raise DamageError(f"a load wrote into blocks that were not its own, layer {layer}")

    def _places(self, request: int) -> torch.Tensor:
        return torch.tensor(self.blocks(request, 0, self._request_blocks), device=self.planes.device)

    def _expected(self, request: int, layer: int) -> torch.Tensor:
        """[N, words of a page], each its own number."""
        page_words = self._words[layer].shape[1]
        first = request * self._request_blocks
        device = self.planes.device
        blocks = torch.arange(first, first + self._request_blocks, device=device).view(-1, 1)
        words = torch.arange(page_words, device=device).view(1, -1)
        return ((blocks * len(self._words) + layer) * page_words + words) * _MIX
