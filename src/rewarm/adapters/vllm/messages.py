"""What passes between the scheduler's side and the ranks: Rewarm's own messages in the classes that vLLM carries."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from rewarm.kv.chunks import StepOrders, StepReport


class OrdersMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to every rank, once a step."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Ranks to the scheduler, after a step; vLLM adds those of all ranks up."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: ReportMetadata) -> ReportMetadata:
        """See vLLM's base class."""
        self.report.add(other.report)
        return self
