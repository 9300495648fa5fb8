"""The whole path over HTTP: mock servers, one honest, one faulty, one with other roundings."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from specpilot.harness.engines.client import EngineClient, Generation, SamplingParams
from specpilot.harness.engines.launch import Role, launch_spec
from specpilot.harness.engines.mock.model import VOCAB
from specpilot.harness.engines.process import ServerProcess, free_port
from specpilot.harness.token_forcing import Calibration, Scorer, audit, calibrate
from specpilot.harness.token_forcing.faulty import write_overlay
from specpilot.types import Deployment, Regime

REQUESTS, TOKENS = 48, 64
SYSTEMS: Mapping[str, tuple[Role, Mapping[str, Any]]] = {
    "scorer": ("scorer", {}),
    "stock": ("stock", {"noise": 0.02, "noise_seed": 1}),
    "near ties": ("candidate", {"noise": 0.02, "noise_seed": 2}),
    "faulty": ("candidate", {"noise": 0.02, "noise_seed": 2}),
}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineClient]]:
    deployment = Deployment(
        id="mock",
        title="mock",
        engine="mock",
        target="",
        drafter=None,
        drafter_kind=None,
        hardware="cpu",
        dtype="float32",
        regime=Regime(),
        workload="random",
        stock={"tokens_per_pass": 8, "delay_ms": 0.0},
        launch={"threads": 1},
    )
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started = {}
        for name, (role, settings) in SYSTEMS.items():
            if name == "faulty":
                overlay = write_overlay(folder / "fault", "mock", bias=2.0, stride=7, after=32)
                settings = {**settings, "overlay": str(overlay)}
            run_dir = folder / name.replace(" ", "_")
            run_dir.mkdir()
            spec = launch_spec(deployment, settings, role, free_port(), run_dir=run_dir)
            started[name] = stack.enter_context(ServerProcess(spec))
        clients = {}
        for name, server in started.items():
            server.wait_healthy(30)
            clients[name] = stack.enter_context(EngineClient(server.base_url))
        yield clients


def generate(client: EngineClient) -> list[Generation]:
    prompts = [tuple((7 * r + i) % VOCAB for i in range(5)) for r in range(REQUESTS)]
    params = SamplingParams(max_new_tokens=TOKENS)
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda p: client.generate(p, params), prompts))


@pytest.fixture(scope="module")
def outputs(clients: dict[str, EngineClient]) -> dict[str, list[Generation]]:
    return {name: generate(clients[name]) for name in ("stock", "near ties", "faulty")}


@pytest.fixture(scope="module")
def variants(clients: dict[str, EngineClient]) -> dict[str, Scorer]:
    return {"stock": Scorer(clients["stock"], VOCAB)}


@pytest.fixture(scope="module")
def frozen(clients, outputs, variants) -> Calibration:
    return calibrate(outputs["stock"], Scorer(clients["scorer"], VOCAB), variants)


def test_a_system_that_differs_in_near_ties_alone_passes(
    clients, outputs, variants, frozen
) -> None:
    verdict = audit(
        outputs["stock"],
        outputs["near ties"],
        Scorer(clients["scorer"], VOCAB),
        frozen,
        variants=variants,
        manifest={"engine": "mock"},
        max_new_tokens=TOKENS,
        stop_token_ids={0},
    )
    assert verdict.identical < REQUESTS
    assert verdict.status == "pass", verdict.reasons


def test_a_server_launched_with_the_fault_is_rejected(clients, outputs, variants, frozen) -> None:
    verdict = audit(
        outputs["stock"],
        outputs["faulty"],
        Scorer(clients["scorer"], VOCAB),
        frozen,
        variants=variants,
    )
    assert verdict.status == "fail" and verdict.failure is None
    assert verdict.rate is not None and verdict.rate.status == "fail"
    assert verdict.events is not None and verdict.events.status == "fail"


def test_a_scorer_that_is_gone_fails_the_audit(outputs, frozen) -> None:
    with EngineClient(f"http://127.0.0.1:{free_port()}", timeout_s=1) as client:
        verdict = audit(outputs["stock"], outputs["stock"], Scorer(client, VOCAB), frozen)
    assert (verdict.status, verdict.failure) == ("fail", "scorer_failed")
