"""The reference engine as a process: started from a deployment, spoken to over HTTP."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specpilot.errors import EngineFailure
from specpilot.harness.deployments.health import check_health
from specpilot.harness.engines.client import EngineClient, Generation, SamplingParams
from specpilot.harness.engines.launch import Role, launch_spec
from specpilot.harness.engines.process import ServerProcess, free_port
from specpilot.mechanisms import registry
from specpilot.types import Deployment, Regime

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]


@pytest.fixture
def deployment(folder, drafter_folder) -> Deployment:
    return Deployment(
        id="tiny",
        title="Tiny",
        engine="reference",
        target=str(folder("hybrid")),
        drafter=str(drafter_folder()),
        drafter_kind="block",
        hardware="cpu",
        dtype="float64",
        regime=Regime(),
        workload="mock",
        stock={"speculation": "chain", "block": 4},
        launch={"threads": 1, "context": 128},
    )


def served(deployment: Deployment, role: Role, tmp_path: Path, **settings) -> list[Generation]:
    spec = launch_spec(deployment, settings, role, free_port(), run_dir=tmp_path)
    with ServerProcess(spec, name=role) as server:
        server.wait_healthy(60)
        with EngineClient(server.base_url) as client:
            params = SamplingParams(max_new_tokens=16, ignore_eos=True)
            results = [client.generate(prompt, params) for prompt in PROMPTS]
            ids = results[0].prompt_ids + results[0].output_ids
            scores = client.score(ids, start=3, top=1)
            assert tuple(row[0] for row in scores.top_ids) == results[0].output_ids
            client.flush()
            assert client.server_info()["backend"]["architecture"] == "Qwen3_5ForCausalLM"
    assert server.exit_status == 0
    return results


def test_ar_and_a_tree_served_by_two_processes_give_the_same_tokens(
    deployment: Deployment, tmp_path: Path
) -> None:
    assert check_health(deployment).ok
    ar = served(deployment, "ar", tmp_path)
    tree = served(deployment, "candidate", tmp_path, speculation="tree", rows=8, top_k=2)
    assert [g.output_ids for g in ar] == [g.output_ids for g in tree]
    assert all(g.tokens_per_pass is None or g.tokens_per_pass <= 1.1 for g in ar)
    counter = registry.get("best_first_tree").counter
    assert all(g.meta[counter] > 0 for g in tree)
    assert not any(g.meta[counter] for g in ar)


def test_a_truncated_target_ends_with_its_reason(deployment: Deployment, tmp_path: Path) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    source = Path(deployment.target)
    (broken / "config.json").write_text((source / "config.json").read_text())
    weights = (source / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    spec = launch_spec(
        replace(deployment, target=str(broken)), {}, "ar", free_port(), run_dir=tmp_path
    )
    with (
        ServerProcess(spec) as server,
        pytest.raises(EngineFailure, match=r"(?s)status 2.*model\.safetensors is truncated"),
    ):
        server.wait_healthy(60)


def test_config_and_tensors_that_disagree_end_with_their_reason(
    deployment: Deployment, tmp_path: Path
) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    source = Path(deployment.target)
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": 96}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    spec = launch_spec(
        replace(deployment, target=str(broken)), {}, "ar", free_port(), run_dir=tmp_path
    )
    with (
        ServerProcess(spec) as server,
        pytest.raises(EngineFailure, match=r"(?s)status 2.*the config calls for"),
    ):
        server.wait_healthy(60)
