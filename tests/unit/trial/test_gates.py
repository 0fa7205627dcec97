from __future__ import annotations

from typing import Any

import pytest

from rewarm.trial.plan import DEMO


def gates(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["name"]: gate for gate in result["gates"]}


def proofs(result: dict[str, Any]) -> dict[str, str]:
    return {proof["name"]: proof["verdict"] for proof in result["proofs"]}


def test_a_good_trial_passes_every_gate(make_trial) -> None:
    result = make_trial()
    assert result["verdict"] == "pass"
    assert {gate["outcome"] for gate in result["gates"]} == {"pass"}
    assert set(proofs(result).values()) == {"OK"}
    assert "read rate: baseline 0.19 GB/s, candidate 0.38" in gates(result)["g3_ttft"]["found"]


def test_g3_is_shown_when_it_fails_and_does_not_make_the_verdict(make_trial) -> None:
    result = make_trial(ttft_s={"fs_limited": 0.31})
    assert gates(result)["g3_ttft"]["outcome"] == "fail"
    assert not gates(result)["g3_ttft"]["required"]
    assert result["verdict"] == "pass"


def test_g3_is_judged_without_a_limit_too(make_trial) -> None:
    result = make_trial(document={})
    assert gates(result)["g3_ttft"]["point"] == pytest.approx(0.75, rel=0.03)  # 0.30 of 0.40: the unlimited tier


def test_slower_than_the_peer_fails(make_trial) -> None:
    result = make_trial(ttft_s={"rewarm": 0.48})
    assert gates(result)["peer"]["outcome"] == "fail"
    assert result["verdict"] == "fail"


def test_a_point_beyond_the_threshold_by_less_than_the_noise_is_open_and_says_how_many_pairs(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block" and fields["arm"] == "rewarm" and fields["phase"] == "recover":
            for request in fields["requests"]:
                request["ttft_s"] *= 1.7 if fields["pair"] % 2 else 1.2

    peer = gates(make_trial(change=change))["peer"]
    assert peer["outcome"] == "inconclusive"
    assert peer["pairs_needed"] > 12
    assert f"about {peer['pairs_needed']} would settle it" in peer["reason"]


def test_one_wrong_token_fails_everything(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block" and (fields["arm"], fields["phase"], fields["pair"]) == ("rewarm", "recover", 5):
            fields["requests"][1]["tokens"][-1] += 1

    result = make_trial(change=change)
    assert gates(result)["tokens"]["outcome"] == "fail"
    assert gates(result)["recovery"]["outcome"] == "inconclusive"  # nothing passes while a proof does not hold
    assert result["verdict"] == "fail"


def test_mismatches_like_those_without_a_cache_are_open(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event != "block" or fields["group"]:
            return
        if fields["arm"] == "recompute" and fields["phase"] != "reference":
            fields["requests"][0]["tokens"][-1] += 1
        if fields["arm"] == "rewarm" and fields["phase"] == "recover" and fields["pair"] == 0:
            fields["requests"][0]["tokens"][-1] += 2

    assert gates(make_trial(change=change))["tokens"]["outcome"] == "inconclusive"


@pytest.mark.parametrize(
    ("name", "where", "fields"),
    [
        ("cold.page_cache", {"phase": "recover", "arm": "fs"}, {"cold": {"method": "x", "resident_pages": 3}}),
        ("cold.page_cache", {"phase": "recover", "arm": "fs"}, {"cold": None}),
        ("cold.reads", {"phase": "recover", "arm": "rewarm"}, {"read_bytes": 1000}),
        ("cold.reads", {"server": "fs"}, {"bytes": 0}),
        ("cold.hits", {"phase": "recover", "arm": "rewarm"}, {"counters": {"external_hits": 100}}),
        ("cold.restart", {"phase": "restart", "arm": "rewarm"}, {"counters": {"external_hits": 0}}),
        ("control.canaries", {"phase": "canary", "arm": "rewarm"}, {"counters": {"external_hits": 128}}),
        ("control.empty_tier", {"phase": "fill", "arm": "fs"}, {"counters": {"external_hits": 128}}),
        ("server.ours", {"server": "fs"}, {"listener_is_ours": False}),
        ("server.clean", {"server": "fs"}, {"left_in_shm": ["/dev/shm/x"]}),
        ("arms.same_server", {"server": "fs"}, {"env": {"A": "2"}}),
    ],
)
def test_each_proof_can_fail(make_trial, name: str, where: dict[str, str], fields: dict[str, Any]) -> None:
    def change(_event: str, found: dict[str, Any]) -> None:
        if all(found.get(key) == value for key, value in where.items()) and set(fields) <= set(found):
            found.update(fields)

    result = make_trial(change=change)
    assert proofs(result)[name] == "FAIL"
    assert gates(result)["cold"]["outcome"] == "fail"
    assert name in gates(result)["cold"]["reason"]
    assert result["verdict"] == "fail"


def test_an_empty_tier_that_answers_at_once_is_found(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block" and fields["phase"] == "fill":
            for request in fields["requests"]:
                request["ttft_s"] /= 10

    assert proofs(make_trial(change=change))["control.empty_tier"] == "FAIL"


def test_an_error_of_one_request_is_found_and_its_block_counts_in_no_figure(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block" and (fields["arm"], fields["phase"], fields["pair"]) == ("rewarm", "recover", 3):
            fields["requests"][0].update(error="500 Internal Server Error", tokens=[])

    result = make_trial(change=change)
    assert proofs(result)["requests.answered"] == "FAIL"
    assert result["arms"]["rewarm"]["blocks"] == 11
    assert gates(result)["peer"]["pairs"] == 11


def test_reads_that_the_kernel_does_not_count_are_not_known(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block":
            fields["read_bytes"] = None

    result = make_trial(change=change)
    assert proofs(result)["cold.reads"] == "UNKNOWN"
    assert result["verdict"] == "inconclusive"


def test_arms_that_differ_from_themselves_decide_nothing(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "block" and fields["phase"] == "noise" and fields["arm"] == "fs":
            change.count += 1  # type: ignore[attr-defined]
            for request in fields["requests"]:
                request["ttft_s"] *= 3 if change.count % 2 else 1  # type: ignore[attr-defined]

    change.count = 0  # type: ignore[attr-defined]
    gate = gates(make_trial(change=change))["g3_ttft"]
    assert gate["outcome"] == "inconclusive"
    assert "too noisy" in gate["reason"]


def test_without_the_candidate_gates_are_open(make_trial) -> None:
    document = {**DEMO, "trial": {"arms": ["recompute", "fs"]}}
    result = make_trial(document=document)
    assert result["verdict"] == "inconclusive"
    assert "no pairs" in gates(result)["peer"]["reason"]


def test_an_interrupted_trial_never_passes(make_trial) -> None:
    def change(event: str, fields: dict[str, Any]) -> None:
        if event == "trial_ended":
            fields.update(outcome="interrupted", message="Ctrl-C")

    assert make_trial(change=change)["verdict"] == "inconclusive"
