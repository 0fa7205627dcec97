"""The panels of the dashboard that grafana_dashboard.py writes."""

from __future__ import annotations

from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The data source that is chosen at the top of the dashboard."""
SERVER = 'instance=~"$instance", model_name=~"$model"'
"""Selects the servers that were chosen at the top of the dashboard."""
INTERVAL = "$__rate_interval"
EACH_SERVER, EACH_ROOT = "{{instance}}", "{{instance}} {{root}}"
TTFT = "vllm:time_to_first_token_seconds"

Queries = list[tuple[str, str]]
"""(expression, legend) of each line of a panel."""


def rows() -> list[tuple[str, list[dict[str, Any]]]]:
    """(title, panels) of each row."""
    return [
        ("At a glance", _glance()),
        ("A slow first token", _loads()),
        ("Load or recompute", _decisions()),
        ("Roots", _reads() + _writes_and_trouble()),
        ("Stores", _stores()),
        ("Host tier", _host()),
        ("Capacity, eviction, wear", _capacity() + _wear()),
    ]


def _glance() -> list[dict[str, Any]]:
    return [
        _stat(
            "Tokens found",
            "Part of all prompt tokens that were asked for and found on the volume.",
            "percentunit",
            _share("rewarm_kv_hit_tokens_total", "rewarm_kv_lookup_tokens_total"),
        ),
        _stat("Loaded", "Bytes a second that came back into KV blocks.", "binBps", _rate("rewarm_kv_load_bytes_total")),
        _stat("TTFT, median", "Of all requests, as vLLM measures it.", "s", _quantile(0.5, TTFT)),
        _stat(
            "Roots left alone",
            "Roots that some server does not read from at the moment.",
            "none",
            f"sum(1 - rewarm_root_healthy{{{SERVER}}})",
            bad_from=1,
        ),
        _stat(
            "Stores lost",
            "Part of all records to be written that were dropped or failed.",
            "percentunit",
            _share("rewarm_kv_stores_total", "rewarm_kv_stores_total", match='outcome=~"dropped|failed"'),
            bad_from=0.1,
        ),
        _stat(
            "Damaged records",
            "Refused in the chosen time because a check did not match; their prompts were computed.",
            "none",
            f"sum(increase(rewarm_damaged_records_total{{{SERVER}}}[$__range]))",
            bad_from=1,
        ),
    ]


def _loads() -> list[dict[str, Any]]:
    part = "rewarm_kv_load_part_seconds"
    return [
        _lines("Time to first token", "Of all requests, as vLLM measures it.", "s", _quantiles(TTFT)),
        _lines(
            "Time of one load",
            "From submit until the last block is in place.",
            "s",
            _quantiles("rewarm_kv_load_seconds"),
        ),
        _lines(
            "Where a load's time goes",
            "Mean of all loads. queue: it waits for workers or the ring; read: the device; copy and scatter: into the "
            "server's memory; step: until the server looks.",
            "s",
            [(_share(f"{part}_sum", f"{part}_count", by="part"), "{{part}}")],
            stacked=True,
        ),
        _lines(
            "Slow loads a minute",
            "Loads over a second that took twice as long as predicted, or longer than computing was to take; the "
            "server's log has a line for them.",
            "none",
            [(f"60 * {_rate('rewarm_kv_slow_loads_total', by='instance')}", EACH_SERVER)],
        ),
        _lines(
            "Records asked for, by outcome",
            "All but hit are computed instead.",
            "ops",
            [(_rate("rewarm_kv_loads_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        _lines(
            "Waiting bytes",
            "Of loads that are not in place yet, and of stores that are not on flash yet.",
            "bytes",
            [
                (_level("sum", "rewarm_kv_load_queue_bytes", by="instance"), f"loads {EACH_SERVER}"),
                (_level("sum", "rewarm_kv_store_queue_bytes", by="instance"), f"stores {EACH_SERVER}"),
            ],
        ),
    ]


def _decisions() -> list[dict[str, Any]]:
    ended = "rewarm_kv_decisions_ended_total"
    return [
        _lines(
            "Decisions by reason",
            "docs/guides/policy.md says what each reason means.",
            "ops",
            [(_rate("rewarm_kv_decisions_total", by="reason"), "{{reason}}")],
            stacked=True,
        ),
        _lines(
            "Seconds a prompt: taken, predicted, computed instead",
            "Means of the decisions that have ended. Where taken lies above computed instead, the tier costs time.",
            "s",
            [
                (_share("rewarm_kv_decision_actual_seconds_total", ended), "taken"),
                (_share("rewarm_kv_decision_predicted_seconds_total", ended), "predicted"),
                (_share("rewarm_kv_decision_compute_seconds_total", ended), "computed instead"),
            ],
        ),
        _lines(
            "Error of predictions",
            "Difference to the actual time, as part of it.",
            "percentunit",
            _quantiles("rewarm_kv_decision_error_ratio"),
        ),
    ]


def _reads() -> list[dict[str, Any]]:
    read, read_s, root = "rewarm_root_read_bytes_total", "rewarm_root_read_seconds_total", "instance, root"
    return [
        _lines(
            "Read from each root",
            "Payload bytes a second, checked and good.",
            "binBps",
            [(_rate(read, by=root), EACH_ROOT)],
        ),
        _lines(
            "A root's rate while it reads",
            "Bytes over the seconds in which there was something to read; dashed: what the load policy counts on.",
            "binBps",
            [
                (_share(read, read_s, by=root), EACH_ROOT),
                (_level("max", "rewarm_root_read_bytes_per_second"), f"policy {EACH_ROOT}"),
            ],
        ),
        _lines(
            "Busy with reads",
            "Part of the time in which a rank had something to read; of several ranks they add up.",
            "percentunit",
            [(_rate(read_s, by=root), EACH_ROOT)],
        ),
    ]


def _writes_and_trouble() -> list[dict[str, Any]]:
    written, write_s, root = "rewarm_root_written_bytes_total", "rewarm_root_write_seconds_total", "instance, root"
    return [
        _lines("Written to each root", "By these servers.", "binBps", [(_rate(written, by=root), EACH_ROOT)]),
        _lines(
            "A root's rate while it writes",
            "Bytes over the seconds in which there was something to write.",
            "binBps",
            [(_share(written, write_s, by=root), EACH_ROOT)],
        ),
        _lines(
            "Trouble, a minute",
            "Times that a root began to be left alone, I/O errors, and records that failed their check.",
            "none",
            [
                (f"60 * {_rate('rewarm_root_pauses_total', by='root, way')}", "no {{way}} {{root}}"),
                (f"60 * {_rate('rewarm_io_errors_total', by='root')}", "I/O error {{root}}"),
                (f"60 * {_rate('rewarm_damaged_records_total', by='root')}", "damaged {{root}}"),
            ],
        ),
        _lines(
            "In use",
            "1: the root is read from; 0: it is left alone (it fails, hangs, or turned much slower), or away.",
            "none",
            [(_level("min", "rewarm_root_healthy"), EACH_ROOT)],
            top=1,
        ),
        _lines(
            "Nothing is stored",
            "1 while nothing is stored on a root, after an error or for want of room.",
            "none",
            [(_level("max", "rewarm_root_stores_paused"), EACH_ROOT)],
            top=1,
        ),
    ]


def _stores() -> list[dict[str, Any]]:
    put_off, refused = "rewarm_kv_stores_put_off_total", "rewarm_kv_stores_over_budget_total"
    return [
        _lines(
            "Records to be written, by outcome",
            "skipped: they lay there already; dropped and failed: a later request computes them again.",
            "ops",
            [(_rate("rewarm_kv_stores_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        _lines(
            "Written",
            "Payload bytes a second.",
            "binBps",
            [(_rate("rewarm_kv_store_bytes_total", by="instance"), EACH_SERVER)],
        ),
        _lines(
            "Put off and refused",
            "Records a second that found no room in the store buffer for now, and that the store budget refused; and 1 "
            "while stores are paused because the volume or its disk is full.",
            "none",
            [
                (_rate(put_off, by="instance"), f"put off {EACH_SERVER}"),
                (_rate(refused, by="instance"), f"over budget {EACH_SERVER}"),
                (_level("max", "rewarm_kv_stores_paused", by="instance"), f"full {EACH_SERVER}"),
            ],
        ),
    ]


def _capacity() -> list[dict[str, Any]]:
    unread, evicted = "rewarm_evicted_unread_records_total", "rewarm_evicted_records_total"
    used, capacity = _level("max", "rewarm_root_used_bytes"), _level("max", "rewarm_root_capacity_bytes")
    return [
        _lines(
            "Used of each root",
            "Part of what it may hold; all processes and servers.",
            "percentunit",
            [(f"{used} / {capacity}", EACH_ROOT)],
            top=1,
        ),
        _lines(
            "The volume",
            "Bytes of all records, and what it may hold.",
            "bytes",
            [
                (_level("max", "rewarm_volume_used_bytes", by="instance"), f"used {EACH_SERVER}"),
                (_level("max", "rewarm_volume_capacity_bytes", by="instance"), f"capacity {EACH_SERVER}"),
            ],
        ),
        _lines(
            "Records",
            "That each server's index knows.",
            "short",
            [(_level("max", "rewarm_volume_records", by="instance"), EACH_SERVER)],
        ),
        _lines(
            "Evicted",
            "Bytes a second. Of servers that share a volume one evicts.",
            "binBps",
            [(_rate("rewarm_evicted_bytes_total", by="instance"), EACH_SERVER)],
        ),
        _lines(
            "Evicted unread",
            "Part of the evicted records that nobody had loaded: close to 1, the volume is too small for its use.",
            "percentunit",
            [(_share(unread, evicted), "unread")],
            top=1,
        ),
        _lines(
            "Start and upkeep",
            "Seconds of the scan at open, and 1 while the janitor runs.",
            "none",
            [
                (_level("max", "rewarm_volume_scan_seconds", by="instance"), f"scan {EACH_SERVER}"),
                (_level("min", "rewarm_janitor_running", by="instance"), f"janitor {EACH_SERVER}"),
            ],
        ),
    ]


def _host() -> list[dict[str, Any]]:
    evicted, records = "rewarm_host_evicted_bytes_total", "rewarm_host_evicted_records_total"
    return [
        _lines(
            "Asked of the host tier, by outcome",
            "All but hit are read from flash.",
            "ops",
            [(_rate("rewarm_host_loads_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        _lines(
            "Copied into the host tier, by outcome",
            "Of records that were read from flash. dropped: too many waited.",
            "ops",
            [(_rate("rewarm_host_promotions_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        _lines(
            "Records in the host tier, and evicted ones a second",
            "That each server's index knows, and that its janitor removed to make room.",
            "short",
            [
                (_level("max", "rewarm_host_records", by="instance"), f"there {EACH_SERVER}"),
                (_rate(records, by="instance"), f"evicted {EACH_SERVER}"),
            ],
        ),
        _lines(
            "Evicted from the host tier", "Bytes a second.", "binBps", [(_rate(evicted, by="instance"), EACH_SERVER)]
        ),
    ]


def _wear() -> list[dict[str, Any]]:
    return [
        _lines(
            "Written in a day",
            "Of all processes, in the last 24 hours; and what the store budget leaves.",
            "bytes",
            [
                (_level("max", "rewarm_root_written_day_bytes"), EACH_ROOT),
                (_level("min", "rewarm_root_store_budget_left_bytes"), f"budget left {EACH_ROOT}"),
            ],
        ),
        _lines(
            "Drive writes a day",
            "And over what the flash is rated for (kv.dwpd): above 1 it wears out early.",
            "none",
            [
                (_level("max", "rewarm_root_dwpd"), EACH_ROOT),
                (_level("max", "rewarm_root_endurance_ratio"), f"over rated {EACH_ROOT}"),
            ],
        ),
    ]


def _rate(metric: str, *, by: str = "", match: str = "") -> str:
    """Growth a second of a counter, over the chosen servers."""
    labels = f"{SERVER}, {match}" if match else SERVER
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{{{labels}}}[{INTERVAL}]))"


def _share(part: str, whole: str, *, by: str = "", match: str = "") -> str:
    """One counter's growth over another's."""
    return f"{_rate(part, by=by, match=match)} / {_rate(whole, by=by)}"


def _level(how: str, metric: str, *, by: str = "instance, root") -> str:
    """A gauge, over the ranks and engines of a server."""
    return f"{how} by ({by}) ({metric}{{{SERVER}}})"


def _quantile(part: float, histogram: str) -> str:
    return f"histogram_quantile({part}, {_rate(f'{histogram}_bucket', by='le')})"


def _quantiles(histogram: str) -> Queries:
    return [(_quantile(part, histogram), name) for part, name in ((0.5, "median"), (0.95, "95 %"))]


def _stat(title: str, description: str, unit: str, expression: str, *, bad_from: float | None = None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green" if bad_from else "text", "value": None}]
    if bad_from:
        steps.append({"color": "red", "value": bad_from})
    panel = _panel("stat", title, description, unit, [(expression, "")], width=4, height=4)
    panel["fieldConfig"]["defaults"] |= {"thresholds": {"mode": "absolute", "steps": steps}, "noValue": "-"}
    panel["options"] = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    return panel


def _lines(
    title: str, description: str, unit: str, queries: Queries, *, stacked: bool = False, top: float | None = None
) -> dict[str, Any]:
    panel = _panel("timeseries", title, description, unit, queries, width=8, height=8)
    defaults = panel["fieldConfig"]["defaults"]
    defaults["min"] = 0
    if top is not None:
        defaults["max"] = top
    defaults["custom"] = {
        "drawStyle": "line",
        "fillOpacity": 30 if stacked else 5,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
    }
    panel["fieldConfig"]["overrides"] = [_dashed("/^policy /")] if "policy" in queries[-1][1] else []
    panel["options"] = {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def _dashed(names: str) -> dict[str, Any]:
    style = {"id": "custom.lineStyle", "value": {"dash": [10, 10], "fill": "dash"}}
    return {"matcher": {"id": "byRegexp", "options": names}, "properties": [style]}


def _panel(
    kind: str, title: str, description: str, unit: str, queries: Queries, *, width: int, height: int
) -> dict[str, Any]:
    targets = [
        {
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": expression,
            "legendFormat": legend,
            "range": True,
            "refId": chr(ord("A") + number),
        }
        for number, (expression, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "gridPos": {"h": height, "w": width, "x": 0, "y": 0},
        "targets": targets,
    }
