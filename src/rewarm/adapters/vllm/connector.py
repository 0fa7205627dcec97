"""The connector that vLLM loads: translates its calls for the two sides, and holds no policy and no I/O of its own.

vLLM makes one instance in the scheduler's process and one in each rank. What differs between the versions that are
known: hooks that some of them lack are simply never called there (on_new_request, get_transfer_results), and
start_load_kv runs before the forward pass in some and after it in others, which asynchronous loads do not mind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger

from rewarm.adapters.seats import CONNECTOR, claim, hinted, release
from rewarm.adapters.vllm import describe
from rewarm.adapters.vllm.groups import loads_whole, windows
from rewarm.adapters.vllm.messages import OrdersMetadata, ReportMetadata
from rewarm.adapters.vllm.scheduler import SchedulerSide
from rewarm.adapters.vllm.setup import scheduler_setup
from rewarm.adapters.vllm.stats import RewarmPromMetrics, RewarmStats
from rewarm.adapters.vllm.versions import check_version
from rewarm.adapters.vllm.worker import open_rank
from rewarm.config import KvConfig, resolve
from rewarm.engine import EngineConfig, open_engine
from rewarm.errors import RewarmError, UsageError
from rewarm.kv.chunks import StepOrders
from rewarm.kv.rank import RankSide, open_volume
from rewarm.metrics import Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.rewarm")

IDLE_WAIT_S = 0.005
"""How long a rank waits for a load in a step that computes nothing; without a wait the server's loop would spin."""


class RewarmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the head of this file."""

    requires_kv_delivery = False
    """A cache: a store that is dropped is a later miss."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counters = Counters()
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSide | None = None
        try:
            self._kv = _configuration(vllm_config)
            check_version(vllm.__version__, allow_untested=self._kv.allow_untested)
            describe.check_served(vllm_config, kv_cache_config)
            assert kv_cache_config is not None
            self._cache = kv_cache_config
            self._is_whole = loads_whole(windows(kv_cache_config))
            self._seat = claim(CONNECTOR)
            if role == KVConnectorRole.SCHEDULER:
                self._open_scheduler_side()
        except RewarmError as error:
            raise hinted(error) from None

    def _open_scheduler_side(self) -> None:
        kv = self._kv
        with ExitStack() as undo:
            self._engine = open_engine(EngineConfig(kind=kv.engine, num_workers=kv.num_workers))
            undo.callback(self._engine.close)
            self._volume = open_volume(kv, self._engine, self._counters, janitor=True)
            undo.callback(self._volume.close)
            setup, notes = scheduler_setup(
                self._vllm_config, self._cache, kv, self._volume, self._counters, version=vllm.__version__
            )
            undo.pop_all()
        for note in notes:
            logger.warning("Rewarm: %s: what is stored in this run is not found by the next", note)
        logger.info(
            "Rewarm: %d tokens a chunk, engine %s, volume %s", setup.chunk_tokens, self._engine.name, ":".join(kv.roots)
        )
        self._scheduler = SchedulerSide(setup)

    # Scheduler's side.

    def on_new_request(self, request: Request) -> None:
        """See vLLM's base class; from 0.23 on."""
        _side(self._scheduler).on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM's base class."""
        return _side(self._scheduler).get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See vLLM's base class."""
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        _side(self._scheduler).update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OrdersMetadata:
        """See vLLM's base class."""
        return OrdersMetadata(_side(self._scheduler).build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM's base class."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, ReportMetadata) else None
        _side(self._scheduler).update_connector_output(report, connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM's base class."""
        return _side(self._scheduler).request_finished(request), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM's base class."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        """See vLLM's base class; asked for where weights were changed under the server."""
        return self._scheduler is None or self._scheduler.reset_cache()

    def take_events(self) -> Iterable[Any]:
        """See vLLM's base class."""
        return _side(self._scheduler).take_events()

    # Rank's side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See vLLM's base class."""
        if self._rank is not None:
            self._rank.close()
        try:
            self._rank = open_rank(self._vllm_config, self._cache, self._kv, self._counters, kv_caches)
        except RewarmError as error:
            raise hinted(error) from None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM's base class."""
        _side(self._rank).worker.start(self._step_orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM's base class; all loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM's base class; stores are taken from whole chunks after the forward pass."""

    def wait_for_save(self) -> None:
        """See vLLM's base class."""
        _side(self._rank).worker.save(self._step_orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM's base class."""
        orders = self._step_orders() if self.has_connector_metadata() else StepOrders()
        ended = _side(self._rank).worker.poll(IDLE_WAIT_S if orders.idle else 0.0, finished_req_ids)
        return set(orders.released) or None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See vLLM's base class; from 0.30 on, where a request can be told to have failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self._is_whole:
            results.failed_recving = set(_side(self._rank).worker.failed_requests)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM's base class. What is left of a sliding window without some blocks is no prefix: there the whole
        request has failed, see get_transfer_results().
        """
        invalid = _side(self._rank).worker.take_invalid_blocks()
        return set() if self._is_whole else invalid

    def build_connector_worker_meta(self) -> ReportMetadata:
        """See vLLM's base class."""
        return ReportMetadata(_side(self._rank).worker.take_report())

    def _step_orders(self) -> StepOrders:
        meta = self._get_connector_metadata()
        assert isinstance(meta, OrdersMetadata)
        return meta.orders

    # Both sides.

    def get_kv_connector_stats(self) -> RewarmStats | None:
        """See vLLM's base class."""
        samples = self._counters.take()
        return RewarmStats.of(samples) if samples else None

    def shutdown(self) -> None:
        """See vLLM's base class."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._volume.close()
            self._engine.close()
            self._scheduler = None
        release(self._seat)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RewarmStats:
        """See vLLM's base class."""
        return RewarmStats(data=data) if data is not None else RewarmStats.of([])

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RewarmPromMetrics:
        """See vLLM's base class."""
        return RewarmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


S = TypeVar("S")


def _side(side: S | None) -> S:
    assert side is not None, "vLLM called the other side of the connector"
    return side


def _configuration(vllm_config: VllmConfig) -> KvConfig:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    kv = resolve(KvConfig, server=extra).config
    if not kv.roots:
        raise UsageError(
            "kv_connector_extra_config names no roots",
            hint='--kv-transfer-config "$(rewarm vllm config --root DIR --size 200GiB)" writes it',
        )
    return kv
