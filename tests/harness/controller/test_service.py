"""A round through the service: what is promoted, what is told, and what bad requests get."""

import grp
import json
import os
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specpilot.errors import (
    CheckFailed,
    Conflict,
    EngineFailure,
    InvalidInput,
    NotFound,
    Unsupported,
)
from specpilot.harness import patches
from specpilot.harness.controller import protocol as p
from specpilot.harness.controller import systems
from specpilot.harness.controller.client import ControllerClient, ensure_running
from specpilot.harness.controller.design import default_design
from specpilot.harness.controller.isolation import Tier
from specpilot.harness.controller.lab import Work
from specpilot.harness.controller.paths import socket_path
from specpilot.harness.controller.service import Server, Service
from specpilot.harness.deployments import registry


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Patches by name: a faster one, one that changes nothing, a slower one."""
    root = tmp_path_factory.mktemp("patches")
    made = {
        "fast": {"tokens_per_pass": 6},
        "same": {"max_running": 4},
        "slow": {"tokens_per_pass": 1},
    }
    return {
        name: patches.create(root, name, name, launch_args=arguments).folder
        for name, arguments in made.items()
    }


def sleeping_patch(root: Path) -> Path:
    """A patch whose server never starts to serve."""
    patch = patches.create(root, "sleeper", "never starts")
    overlay = patch.folder / "overlay"
    overlay.mkdir()
    (overlay / "overlay.py").write_text("def apply(backend):\n    __import__('time').sleep(600)\n")
    manifest = json.loads((patch.folder / "manifest.json").read_text()) | {"overlay": "overlay"}
    (patch.folder / "manifest.json").write_text(json.dumps(manifest))
    return patch.folder


@pytest.fixture(scope="module")
def finished(
    controller: Any, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A whole round: a slower candidate, a faster one, one that changes nothing, the final."""
    round_id = controller.open()
    jobs = {name: controller.trial(round_id, folders[name]) for name in ("slow", "fast")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(systems.START_S, "mock", 3.0)
        sleeper = sleeping_patch(tmp_path_factory.mktemp("sleeper"))
        jobs["sleeper"] = controller.trial(round_id, sleeper)
    jobs["same"] = controller.trial(round_id, folders["fast"], folders["same"])
    jobs["final"] = controller.final(round_id)
    return {"round": round_id, **jobs}


def test_a_faster_candidate_is_promoted_after_a_confirmation(finished: dict[str, Any]) -> None:
    result = finished["fast"].result
    assert result["verdict"] == "promoted", result["reason"]
    assert result["confirmed"]
    assert result["gain"] > 20
    assert result["lower_bound"] > result["threshold"] >= 1.0
    assert result["forcing"]["status"] == "pass"
    measured = default_design(registry.load("mock"), "trial", 0).requests_per_arm
    assert result["forcing"]["requests"] == 2 * measured  # the trial's and its confirmation's
    assert result["tokens_per_pass"] == {
        "stock": pytest.approx(2.4, abs=0.3),
        "candidate": pytest.approx(5.6),
    }


def test_a_slower_candidate_is_rejected_without_an_audit(finished: dict[str, Any]) -> None:
    result = finished["slow"].result
    assert (result["verdict"], result["forcing"]) == ("rejected", None)
    assert result["gain"] < 0
    assert "More cycles cannot help" in result["reason"]


def test_an_equal_candidate_is_not_promoted(controller: Any, finished: dict[str, Any]) -> None:
    result = finished["same"].result
    assert result["verdict"] == "rejected"
    assert result["against"] == "best"
    assert controller.status(finished["round"]).best == ["fast"]


def test_the_final_says_all_that_a_closing_table_needs(finished: dict[str, Any]) -> None:
    final = finished["final"].result
    assert final["verdict"] == "promoted", final["reason"]
    assert final["requests"] == 64 and final["tokens"] == 64 * 56
    assert set(final["tokens_per_s"]) == set(final["tokens_per_pass"]) == {"ar", "stock", "final"}
    assert final["tokens_per_pass"]["ar"] == 1.0
    for ratio in final["speedups"].values():
        assert ratio["low"] < ratio["value"] < ratio["high"]
    assert final["speedups"]["final_over_ar"]["value"] > final["speedups"]["stock_over_ar"]["value"]
    assert final["forcing"]["status"] == "pass"
    assert final["forcing"]["token_sha256"] == final["token_sha256"]
    assert final["isolation"]["title"] in ("none", "landlock", "bubblewrap", "user")


def test_replies_tell_nothing_about_single_prompts(finished: dict[str, Any]) -> None:
    for name in ("fast", "same", "slow", "final"):
        text = json.dumps(finished[name].result)
        assert not any(word in text for word in ("prompt_ids", "log_ratio", "seed"))


def test_bounds_are_rounded_to_a_tenth_of_a_percent(finished: dict[str, Any]) -> None:
    bound = finished["final"].result["lower_bound"]
    assert bound == round(bound, 1)


def test_the_design_is_written_before_every_result_and_the_set_is_burned(
    controller: Any, finished: dict[str, Any]
) -> None:
    kinds = [
        (record.kind, record.body.get("purpose", "").split(" ")[0])
        for record in controller.service.ledger.records()
        if record.body.get("round") == finished["round"]
    ]
    assert kinds == [
        ("round_open", ""),
        ("design", "noise"),
        ("noise", ""),
        ("calibration", ""),
        ("design", "trial"),
        ("trial", ""),
        ("design", "trial"),
        ("design", "confirmation"),
        ("trial", ""),
        ("trial", ""),
        ("design", "trial"),
        ("trial", ""),
        ("burn", ""),
        ("design", "final"),
        ("final", ""),
    ]


def test_receipts_are_genuine_only_as_they_are(controller: Any, finished: dict[str, Any]) -> None:
    receipt = finished["final"].result["receipt"]
    found = controller.service.receipt_check(p.ReceiptCheck(**receipt))
    assert found.genuine and found.view == finished["final"].result
    forged = p.ReceiptCheck(**{**receipt, "hash": "0" * 64})
    assert not controller.service.receipt_check(forged).genuine


def test_a_closed_round_takes_no_more(
    controller: Any, finished: dict[str, Any], folders: dict[str, Path]
) -> None:
    assert controller.status(finished["round"]).state == "closed"
    with pytest.raises(Conflict, match="had its final"):
        controller.start_trial(finished["round"], folders["fast"])
    with pytest.raises(Conflict, match="had its final"):
        controller.final(finished["round"])


def test_a_rejected_trial_can_be_audited_afterwards(
    controller: Any, finished: dict[str, Any]
) -> None:
    ask = p.ForcingCheck(round=finished["round"], owner=controller.owner, trial="t04")
    view = controller.wait(controller.service.forcing_check(ask).job)
    assert view.state == "done", view.error
    assert view.result["forcing"]["mismatches"] == 0


def test_the_ledger_verifies(controller: Any, finished: dict[str, Any]) -> None:
    reply = controller.service.ledger_verify(p.LedgerVerify())
    assert reply.ok and reply.problem is None
    ahead = p.HeadBody(seq=reply.head.seq + 5, hash="0" * 64)
    cut = controller.service.ledger_verify(p.LedgerVerify(expect=ahead))
    assert cut.problem_kind == "truncation"


def test_a_cancelled_trial_promotes_nothing_and_leaves_nothing(
    controller: Any, folders: dict[str, Path]
) -> None:
    round_id = controller.open()
    job = controller.start_trial(round_id, folders["fast"])
    controller.wait(job, until=lambda view: view.message == "timing")
    view = controller.service.job_cancel(p.JobCancel(job=job))
    assert view.state == "cancelled"
    assert controller.leftovers() == []
    assert controller.status(round_id).best == []
    last = [r for r in controller.service.ledger.records("aborted") if r.body["job"] == job]
    assert len(last) == 1


def test_a_candidate_that_a_cancel_ended_is_not_recorded_as_failed(
    controller: Any, tmp_path: Path
) -> None:
    round_id = controller.open()
    job = controller.start_trial(round_id, sleeping_patch(tmp_path))
    kinds: set[str] = set()
    while "calibration" not in kinds:  # what the round's first trial does before its systems start
        time.sleep(0.1)
        kinds = {r.kind for r in controller.service.ledger.records() if r.body.get("job") == job}
    time.sleep(1.0)
    assert controller.service.job_cancel(p.JobCancel(job=job)).state == "cancelled"
    assert controller.status(round_id).trials == []


def test_a_server_that_never_gets_healthy_fails_its_trial(finished: dict[str, Any]) -> None:
    result = finished["sleeper"].result
    assert result["verdict"] == "failed"
    assert "not healthy within" in result["reason"]


def test_a_patch_that_does_not_apply_is_refused_at_once(controller: Any, tmp_path: Path) -> None:
    round_id = controller.open()
    wrong = patches.create(tmp_path, "wrong", "wrong", launch_args={"turbo": True})
    with pytest.raises(InvalidInput, match="turbo"):
        controller.start_trial(round_id, wrong.folder)
    with pytest.raises(NotFound):
        controller.start_trial(round_id, tmp_path / "nowhere")
    assert controller.status(round_id).trials == []


def test_only_the_owner_uses_a_round(controller: Any, folders: dict[str, Path]) -> None:
    round_id = controller.open()
    stranger = replace(controller, owner="somebody else")
    with pytest.raises(Conflict, match="another owner"):
        stranger.start_trial(round_id, folders["fast"])
    with pytest.raises(Conflict, match="another owner"):
        stranger.final(round_id)


def test_two_finals_at_once_do_not_both_start(controller: Any) -> None:
    round_id = controller.open()
    ask = p.FinalStart(round=round_id, owner=controller.owner)
    first = controller.service.final_start(ask).job
    with pytest.raises(Conflict, match="busy"):
        controller.service.final_start(ask)
    assert controller.service.job_cancel(p.JobCancel(job=first)).state == "cancelled"


def test_a_final_without_isolation_is_refused_unless_it_is_allowed(controller: Any) -> None:
    lab = replace(controller.service.lab, tier=Tier.NONE)
    with pytest.raises(Unsupported, match="isolation tier"):
        lab.check_final(allow_unsealed=False)
    lab.check_final(allow_unsealed=True)


def test_unknown_things_are_named(controller: Any) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        controller.service.round_open(p.RoundOpen(deployment="nothing-here", owner="me"))
    with pytest.raises(NotFound, match="r9999"):
        controller.status("r9999")
    with pytest.raises(NotFound, match="j9999"):
        controller.service.job_status(p.JobStatus(job="j9999"))


def test_a_second_controller_of_one_state_is_refused(controller: Any) -> None:
    with pytest.raises(Conflict, match="Another controller"):
        Service(controller.service.home)


def test_the_key_and_the_socket_are_private(controller: Any) -> None:
    for path in (controller.service.folder / "key", socket_path(controller.service.home)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "controller"
    folder.mkdir()
    (folder / "key").write_text("a" * 64)
    (folder / "key").chmod(0o644)
    with pytest.raises(CheckFailed, match="chmod 600"):
        Service(tmp_path)


def test_a_client_asks_over_the_socket_and_gets_typed_errors(controller: Any) -> None:
    with ControllerClient(socket_path(controller.service.home)) as client:
        hello = client.hello()
        assert hello.pid == os.getpid()
        assert hello.isolation.tier == int(controller.service.lab.tier)
        round_id = client.round_open(controller.deployment, "me").round
        assert "tester" not in client.round_status(round_id).model_dump_json()
        with pytest.raises(NotFound, match="nothing-here"):
            client.round_open("nothing-here", "me")
        assert client.head.seq >= 0
        assert client.ledger_verify().ok


def test_a_client_that_saw_a_later_head_notices_a_ledger_that_went_back(controller: Any) -> None:
    with ControllerClient(socket_path(controller.service.home)) as client:
        client.round_open(controller.deployment, "me")
        seen = client.head
        client.head = p.HeadBody(seq=seen.seq + 10, hash="0" * 64)
        with pytest.raises(CheckFailed, match="went back"):
            client.hello()
        client.head = p.HeadBody(seq=seen.seq, hash="0" * 64)
        with pytest.raises(CheckFailed, match="replaced"):
            client.hello()


def test_a_round_on_sampled_text_is_refused_before_it_costs_anything(controller: Any) -> None:
    definition = json.loads((controller.service.home / "deployments" / "quick.json").read_text())
    definition["regime"]["temperature"] = 0.7
    registry.add(definition | {"id": "sampled"})
    with pytest.raises(Unsupported, match="temperature 0"):
        replace(controller, deployment="sampled").open()


def test_a_trial_that_waited_for_a_final_is_not_run(
    specpilot_home: Path, quick_deployment: str
) -> None:
    service = Service(specpilot_home)
    round_id = service.round_open(p.RoundOpen(deployment=quick_deployment, owner="me")).round
    service.ledger.append("final", {"round": round_id})
    work = Work(service.lab, service.rounds.get(round_id), "j1", threading.Event(), lambda *_: None)
    with pytest.raises(Conflict, match="had its final"):
        work.trial("t01", [])
    service.close()


def test_an_empty_ledger_has_no_head_to_replace(specpilot_home: Path) -> None:
    service = Service(specpilot_home)
    server = Server(service, socket_path(specpilot_home))
    thread = threading.Thread(target=server.serve)
    thread.start()
    with ControllerClient(server.path) as client:
        assert client.hello() == client.hello()
    server.stop()
    thread.join()
    service.close()


def test_a_head_is_remembered_by_later_clients_of_the_process(controller: Any) -> None:
    path = socket_path(controller.service.home)
    with ControllerClient(path) as client:
        client.round_open(controller.deployment, "me")
        seen = client.head
    with ControllerClient(path) as later:
        assert later.head == seen
        later.hello()


def test_a_controller_that_runs_as_a_service_is_used_and_none_is_started(
    controller: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "service.sock"
    group = grp.getgrgid(os.getgid()).gr_name
    server = Server(controller.service, path, group=group)
    thread = threading.Thread(target=server.serve)
    thread.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    monkeypatch.setenv("SPECPILOT_CONTROLLER", str(path))
    with ensure_running(tmp_path / "elsewhere") as client:
        assert client.hello().home == str(controller.service.home)
    server.stop()
    thread.join()
    with pytest.raises(EngineFailure, match="No controller answers"):
        ensure_running(tmp_path / "elsewhere")


def test_a_missing_controller_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="specpilot controller"):
        ControllerClient(tmp_path / "controller.sock")


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b'{"id": 1}\n',
        b'{"id": 1, "method": "promote", "params": {}}\n',
        b'{"id": 1, "method": "round_open", "params": {"deployment": "quick"}}\n',
        b'{"id": 1, "method": "round_open", "params": {"deployment": 7, "owner": "me"}}\n',
        b'{"id": 1, "method": "hello", "params": {"x": 1}}\n',
        b'{"id": 1, "method": "job_status", "params": {"job": "j", "wait_s": 1e9}}\n',
    ],
)
def test_malformed_requests_get_an_error_and_the_service_goes_on(
    controller: Any, line: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_path(controller.service.home)))
        client.sendall(line)
        reply = p.Reply.model_validate_json(client.makefile("rb").readline())
    assert reply.error is not None and reply.error.type in ("InvalidInput", "NotFound")
    assert reply.result is None
