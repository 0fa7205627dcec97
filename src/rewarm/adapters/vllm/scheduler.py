"""The scheduler's side of the connector: which chunks to load, which to store, and what became of them.

No torch and no I/O on this thread: presence comes from the volume's index, and probes go through the engine.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rewarm.adapters.vllm.groups import NULL_BLOCK, chunk_load, held_blocks, loads_whole
from rewarm.adapters.vllm.held import HeldRequests
from rewarm.adapters.vllm.setup import SchedulerSetup
from rewarm.errors import AdapterError, RewarmError
from rewarm.kv.announcer import Announcer
from rewarm.kv.chunks import LoadOrder, StepOrders, StepReport, StoreOrder
from rewarm.kv.decision_log import DecisionLog
from rewarm.kv.fingerprint import run_nonce
from rewarm.kv.identity import with_layout
from rewarm.kv.keys import chunk_id, group_chunk
from rewarm.kv.pilot import Pilot
from rewarm.kv.policy import Part, PrefixHit
from rewarm.kv.presence import ChunkPresence, PrefixLookup, Shard
from rewarm.volume.quota import tenant_of
from rewarm.volume.recovery import host_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


logger = logging.getLogger("vllm.rewarm")

MAX_LATE_STORES = 64
"""Of finished requests, ordered in one step: more than a disk takes meanwhile."""


@dataclass(slots=True)
class _Tracked:
    """One request that the server has not finished."""

    request: Request
    salt: bytes
    is_served: bool
    """False where its KV depends on more than its block hashes tell."""
    block_ids: tuple[list[int], ...] = ()
    """Of each KV cache group; one that slides has other blocks by now, see held_blocks()."""
    num_considered: int = 0
    """Leading chunks that were considered for a store."""
    put_off: list[int] = field(default_factory=list)
    """Chunks whose store found no room; ordered again while the request holds its blocks."""
    ordered_step: int = 0
    """The last step that ordered a store of it."""
    first_failed: int = sys.maxsize
    """The first chunk whose store failed. None behind it is stored: a lookup ends there, and whoever computes this
    context again stores all of it."""
    lookup: PrefixLookup | None = None
    hit: PrefixHit | None = None
    """What the last lookup found; None: there was none since the request was taken on."""
    has_failed: bool = False
    """A load of all or nothing failed. vLLM (0.32 read) still counts the blocks of that load against the next one,
    which might wait for them for ever: the request is computed."""
    is_prefill: bool = True
    """Prompt tokens are still computed, or come first again."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load that is under way."""

    chunks: frozenset[bytes]
    first: int
    """Index of the first of its chunks."""
    begin: int
    """Tokens before it."""
    end: int
    """Tokens with it."""


class SchedulerSide:
    """See the head of this file. Its methods are the connector's of the same name, less what only vLLM's types need."""

    def __init__(self, setup: SchedulerSetup) -> None:
        self._setup = setup
        self._chunk_blocks = setup.chunk_tokens // setup.block_tokens
        self._is_whole = loads_whole(setup.windows)
        self._layouts: dict[int, tuple[str, int]] = {}
        self._presence: ChunkPresence | None = None
        self._pilot: Pilot | None = None
        """There when the presence is known."""
        self._announcer: Announcer | None = None
        """There when the presence is known and somebody asked for KV events."""
        self._chunk_bytes = 0
        self._num_changes = setup.volume.num_changes
        """Of the volume's roots, that the pilot was told of."""
        self._is_off = False
        """The volume failed before the first request; all is computed."""
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, _Loading] = {}
        self._short: dict[str, int] = {}
        """Request whose load ended early on some rank -> the first of its chunks that is not in place."""
        self._step = 0
        self._stores: dict[bytes, tuple[str, int]] = {}
        self._held = HeldRequests(setup.hold_blocks)
        self._orders = StepOrders()
        self._lora_salts: dict[tuple[str, str], bytes] = {}
        self._reset_salt = b""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens to load after those computed, whether any); (None, False): not known yet, ask again."""
        tracked = self._track(request)
        if not tracked.is_served or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self._presence is None or self._pilot is None:
            return (0, False) if self._is_off else (None, False)
        first = num_computed_tokens // self._setup.chunk_tokens
        lookup = tracked.lookup
        if lookup is None or lookup.first > first:
            lookup = tracked.lookup = self._presence.look_up(self._chunk_ids(tracked), first)
        end = first if tracked.has_failed else lookup.end()
        if end is None:
            return None, False
        hit = tracked.hit = self._hit(tracked, lookup, num_computed_tokens, end)
        if not hit.num_chunks:
            return 0, False
        if self._setup.kv.policy != "never" and self._setup.shares_blocks and self._is_loading(lookup.chunks[first]):
            return None, False  # another request loads this prefix: its blocks will serve this one too
        num_tokens = self._pilot.decide(hit)
        if num_tokens and num_tokens < hit.num_stored_tokens and self._is_whole:
            # A shorter prefix needs other chunks of the windows before its end.
            end = (num_computed_tokens + num_tokens) // self._setup.chunk_tokens
            end = self._presence.count_present(lookup.chunks[:end], first)
            num_tokens = max(0, end * self._setup.chunk_tokens - num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def on_new_request(self, request: Request) -> None:
        """Tell the policy what of a request is stored before the server asks, as far as the index knows."""
        if self._presence is None or self._pilot is None or not self._pilot.is_asking:
            return
        tracked = self._track(request)
        if tracked.is_served and not getattr(request, "skip_reading_prefix_cache", False):
            lookup = self._presence.look_up(self._chunk_ids(tracked), 0)
            self._pilot.learn(self._hit(tracked, lookup, 0, self._presence.count_present(lookup.chunks, 0)))

    def _hit(self, tracked: _Tracked, lookup: PrefixLookup, num_resident_tokens: int, end: int) -> PrefixHit:
        first = num_resident_tokens // self._setup.chunk_tokens
        num_stored_tokens = max(0, end * self._setup.chunk_tokens - num_resident_tokens)
        prefix = lookup.chunks[first] if num_stored_tokens and self._setup.shares_blocks else b""
        num_chunks = end - first if num_stored_tokens else 0
        num_host = lookup.num_in_host(first, end) if num_chunks and self._setup.volume.host_root_id else 0
        request = tracked.request
        return PrefixHit(
            request.request_id, request.num_tokens, num_resident_tokens, num_stored_tokens, num_chunks, prefix, num_host
        )

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Order the load of ``num_external_tokens`` after those that were computed at the last lookup, into the blocks
        of the request, told for each KV cache group.
        """
        tracked = self._track(request)
        lookup, tracked.lookup = tracked.lookup, None
        hit, tracked.hit = tracked.hit, None
        chunk_tokens = self._setup.chunk_tokens
        begin = hit.num_resident_tokens if hit is not None else 0
        if hit is not None and self._pilot is not None:
            counters = self._setup.counters
            counters.add("rewarm_kv_lookup_tokens_total", max(0, request.num_tokens - begin))
            counters.add("rewarm_kv_hit_tokens_total", num_external_tokens)
            tracked.is_prefill = True
            self._pilot.ordered(hit, num_external_tokens)
        if not num_external_tokens:
            return
        end = begin + num_external_tokens
        if lookup is None or end % chunk_tokens:
            raise AdapterError(f"vLLM asks for {num_external_tokens} tokens after {begin}, which were not offered")
        first, begin_block = begin // chunk_tokens, begin // self._setup.block_tokens
        bases = lookup.chunks[first : end // chunk_tokens]
        loads = []
        for group, ids in enumerate(block_ids):
            for index, base in enumerate(bases, start=first):
                blocks = (index * self._chunk_blocks, (index + 1) * self._chunk_blocks)
                load = chunk_load(group_chunk(base, group), ids, *blocks, begin_block)
                loads += [load] if load is not None else []
        self._orders.loads.append(LoadOrder(request.request_id, loads))
        chunks = [load.chunk for load in loads]
        self._loading[request.request_id] = _Loading(frozenset(bases), first, begin, end)
        assert self._presence is not None
        self._presence.touch(chunks)
        self._note_owner(tracked, chunks)
        if self._announcer is not None:
            for number, chunk in enumerate(chunks):
                self._announcer.found(chunk, request, first + number)

    def build_connector_meta(self, output: SchedulerOutput) -> StepOrders:
        """The orders of this step."""
        parts: list[Part] = []
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = tuple(list(ids) for ids in new.block_ids)
                self._order_stores(tracked, new.num_computed_tokens, output)
                self._note_part(parts, tracked, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = tuple([] for _ in tracked.block_ids)
                tracked.is_prefill = True
            new_ids = cached.new_block_ids[index]
            for ids, more in zip(tracked.block_ids, new_ids or (), strict=False):
                ids.extend(more)
            self._order_stores(tracked, cached.num_computed_tokens[index], output)
            if tracked.is_prefill:
                self._note_part(parts, tracked, cached.num_computed_tokens[index], output)
        self._order_late_stores()
        orders, self._orders = self._orders, StepOrders()
        orders.released = self._held.take_released()
        orders.idle = output.total_num_scheduled_tokens == 0
        self._step += 1
        orders.step = self._step
        self._held.ordered(self._step, len(orders.stores) + len(orders.late_stores))
        if self._pilot is not None:
            orders.idle &= not self._pilot.is_hurried
            orders.cuts = self._pilot.begin_step(self._step, parts)
        if self._presence is None:
            orders.identity = self._setup.identity
        return orders

    @staticmethod
    def _note_part(parts: list[Part], tracked: _Tracked, num_computed_tokens: int, output: SchedulerOutput) -> None:
        request = tracked.request
        end = num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        parts.append((request.request_id, num_computed_tokens, end))
        tracked.is_prefill = end < request.num_tokens

    def update_connector_output(self, report: StepReport | None, finished_recving: Iterable[str]) -> None:
        """Learn what the ranks did."""
        if report is not None:
            for request_id, index in report.short.items():
                self._short[request_id] = min(index, self._short.get(request_id, index))
        ended = {request_id: self._end_load(request_id) for request_id in finished_recving}
        if report is None:
            return
        self._setup.volume.follow(report.paused)
        self._held.reported(report.step, report.store_room, report.store_stuck_s)
        if self._pilot is not None:
            if self._num_changes != self._setup.volume.num_changes:
                self._num_changes = self._setup.volume.num_changes
                self._pilot.set_shares(self._setup.volume.shares())
            self._pilot.end_step(report, ended)
        if report.layouts and self._presence is None:
            self._layouts.update(report.layouts)
            if all(rank in self._layouts for rank in self._setup.holders):
                self._open_presence()
        if self._presence is not None:
            self._presence.take(report)
        if self._announcer is not None:
            self._announcer.take(report)
        self._settle_stores(report)

    def _settle_stores(self, report: StepReport) -> None:
        for chunk in report.put_off:
            if (settled := self._settle(chunk)) is not None:
                settled[0].put_off += [settled[1]] if settled[1] not in settled[0].put_off else []
            else:
                self._count_dropped(1)
        for chunk in report.dropped:
            if (settled := self._settle(chunk)) is not None:
                settled[0].first_failed = min(settled[0].first_failed, settled[1])
        for chunk in report.stored:
            if self._presence is not None and self._presence.is_storing(chunk):
                continue  # other ranks are still at it
            if (settled := self._settle(chunk)) is not None and report.elsewhere:
                self._note_owner(settled[0], [chunk])  # in the log of the root where it is

    def _settle(self, chunk: bytes) -> tuple[_Tracked, int] | None:
        """The request and the number of a chunk whose store has ended in some way; None where that is told again, or
        the request is gone.
        """
        request_id, index = self._stores.pop(chunk, ("", 0))
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        return tracked, index

    def _end_load(self, request_id: str) -> int:
        """Tokens from the start of the prompt that are there now."""
        loading = self._loading.pop(request_id, None)
        short = self._short.pop(request_id, None)
        if loading is None:
            return 0
        if short is None:
            return loading.end
        if self._is_whole:
            if request_id in self._tracked:
                self._tracked[request_id].has_failed = True
            return 0
        return max(loading.begin, (loading.first + short) * self._setup.chunk_tokens) if short else loading.begin

    def request_finished(self, request: Request) -> bool:
        """Forget a request, or keep its blocks until its last chunks are out of them.

        Returns:
            Whether the server is to keep the blocks; a step's ``released`` orders name it when they may go.
        """
        request_id = request.request_id
        if self._pilot is not None:
            self._pilot.forget(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return False
        may_lack_room = self._held.is_unreported(tracked.ordered_step) and self._held.is_room_short
        if (tracked.put_off or may_lack_room) and self._held.hold(request_id, sum(map(len, tracked.block_ids))):
            return True
        self._drop(request_id)
        return False

    def _drop(self, request_id: str) -> None:
        self._count_dropped(len(self._tracked.pop(request_id).put_off))

    def _order_late_stores(self) -> None:
        """Of finished requests that are held: their blocks were filled in earlier steps."""
        left = 0 if self._held.is_stuck else MAX_LATE_STORES
        for request_id in self._held.names:
            tracked = self._tracked[request_id]
            put_off = sorted(tracked.put_off)
            tracked.put_off = put_off[left:]
            for index in put_off[:left]:
                left -= 1
                self._order_store(tracked, index, tracked.block_ids, self._orders.late_stores)
            is_open = tracked.put_off or self._held.is_unreported(tracked.ordered_step)
            if self._held.is_stuck or not is_open:
                self._held.release(request_id)
                self._drop(request_id)

    def reset_cache(self) -> bool:
        """From now on nothing that was stored before is served by this server; others still find it."""
        self._reset_salt = run_nonce().encode()
        for tracked in self._tracked.values():
            tracked.lookup = tracked.hit = None
            tracked.salt = self._salt(tracked.request)
        if self._announcer is not None:
            self._announcer.forget()
        return True

    def take_events(self) -> list[Any]:
        """KV events since the last call: what is on the volume, and what is known to be gone from it."""
        return self._announcer.take_events() if self._announcer is not None else []

    def _open_presence(self) -> None:
        shards = []
        for rank in self._setup.holders:
            layout, payload_bytes = self._layouts[rank]
            identity = with_layout(self._setup.identity, layout)
            try:
                namespace = self._setup.volume.namespace(identity, payload_bytes=payload_bytes)
            except RewarmError as error:
                logger.warning("Rewarm: nothing is loaded or stored in this run: %s", error.message)
                self._is_off = True
                return
            shards.append(Shard(namespace, rank))
            self._chunk_bytes += payload_bytes
        window_chunks = [-(-tokens // self._setup.chunk_tokens) for tokens in self._setup.windows]
        self._chunk_bytes *= max(1, window_chunks.count(0))  # what windows add to a long load is little
        self._presence = ChunkPresence(shards, store=self._setup.kv.store, windows=window_chunks)
        self._pilot = self._make_pilot(namespace.id)
        if self._setup.events is not None:
            self._announcer = Announcer(self._presence, self._setup.events)

    def _make_pilot(self, namespace_id: bytes) -> Pilot:
        setup = self._setup
        log = None
        if not setup.kv.read_only:
            log = DecisionLog(setup.volume.policy_directory, f"{host_name()}-{namespace_id.hex()[:16]}")
        return Pilot(
            setup.kv.policy,
            counters=setup.counters,
            shares=setup.volume.shares(),
            chunk_tokens=setup.chunk_tokens,
            chunk_bytes=self._chunk_bytes,
            step_tokens=setup.step_tokens,
            prefill_limit=setup.prefill_limit,
            log=log,
            num_holders=len(setup.holders),
            may_cut=not self._is_whole,
            root_name=setup.volume.root_name,
            host_root_id=setup.volume.host_root_id,
        )

    def close(self) -> None:
        """Keep what the policy learned."""
        if self._pilot is not None:
            self._pilot.close()

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            # Prompts given as embeddings: older servers leave them out of their block hashes.
            is_served = getattr(request, "prompt_embeds", None) is None
            tracked = _Tracked(request, self._salt(request), is_served)
            self._tracked[request.request_id] = tracked
        return tracked

    def _salt(self, request: Request) -> bytes:
        lora: Any = getattr(request, "lora_request", None)
        if lora is None:
            return self._reset_salt
        name = (str(lora.lora_name), str(lora.lora_path))
        if name not in self._lora_salts:
            self._lora_salts[name] = self._setup.lora_salt(name[1])
        return self._lora_salts[name] + self._reset_salt

    def _chunk_id(self, tracked: _Tracked, index: int) -> bytes:
        block_hash = tracked.request.block_hashes[(index + 1) * self._setup.chunk_tokens // self._setup.hash_tokens - 1]
        return chunk_id(block_hash, tracked.salt)

    def _chunk_ids(self, tracked: _Tracked) -> list[bytes]:
        return [self._chunk_id(tracked, index) for index in range(self._num_hashed_chunks(tracked))]

    def _num_hashed_chunks(self, tracked: _Tracked) -> int:
        return len(tracked.request.block_hashes) * self._setup.hash_tokens // self._setup.chunk_tokens

    def _is_loading(self, chunk: bytes) -> bool:
        return any(chunk in loading.chunks for loading in self._loading.values())

    def _order_stores(self, tracked: _Tracked, num_computed_tokens: int, output: SchedulerOutput) -> None:
        """Order the chunks that are computed by the end of this step; tokens that may yet be rejected have no hash."""
        if self._presence is None or not self._may_store(tracked):
            return
        request_id = tracked.request.request_id
        num_tokens = num_computed_tokens + output.num_scheduled_tokens[request_id]
        num_ready = min(num_tokens // self._setup.chunk_tokens, self._num_hashed_chunks(tracked))
        put_off = [index for index in tracked.put_off if index < num_ready]
        tracked.put_off = [index for index in tracked.put_off if index >= num_ready]
        to_consider = (*put_off, *range(tracked.num_considered, num_ready))
        slides = any(self._setup.windows) and to_consider
        block_ids = held_blocks(output, request_id) if slides else tracked.block_ids
        for index in to_consider:
            self._order_store(tracked, index, block_ids, self._orders.stores)
        tracked.num_considered = max(tracked.num_considered, num_ready)

    def _order_store(
        self, tracked: _Tracked, index: int, block_ids: Sequence[Sequence[int]], orders: list[StoreOrder]
    ) -> None:
        assert self._presence is not None
        base = self._chunk_id(tracked, index)
        if index > tracked.first_failed:
            self._count_dropped(not self._presence.is_present(base))
            return
        for group, ids in enumerate(block_ids):
            chunk, blocks = group_chunk(base, group), ids[index * self._chunk_blocks : (index + 1) * self._chunk_blocks]
            if NULL_BLOCK in blocks:
                continue  # a window has passed: no block holds all of it any more
            if self._presence.wants_store(chunk):
                orders.append(StoreOrder(chunk, array("q", blocks)))
                self._stores[chunk] = (tracked.request.request_id, index)
                tracked.ordered_step = self._step + 1
                self._note_owner(tracked, [chunk])
                if self._announcer is not None:
                    self._announcer.ordered(chunk, tracked.request, index)
            elif self._announcer is not None and self._presence.is_present(chunk):
                self._announcer.found(chunk, tracked.request, index)

    def _may_store(self, tracked: _Tracked) -> bool:
        kv = self._setup.kv
        is_short = kv.store == "prompts_over_tokens" and tracked.request.num_prompt_tokens < kv.store_min_tokens
        return tracked.is_served and not kv.read_only and not is_short

    def _note_owner(self, tracked: _Tracked, chunks: list[bytes]) -> None:
        """Of a tenant's request: its chunks count for the tenant's quota. All of them have its salt in their hashes."""
        salt = getattr(tracked.request, "cache_salt", None)
        if salt and chunks and self._presence is not None:
            self._presence.own(chunks, tenant_of(salt))

    def _count_dropped(self, num_chunks: int) -> None:
        self._setup.counters.add("rewarm_kv_stores_total", num_chunks * len(self._setup.holders), "dropped")
