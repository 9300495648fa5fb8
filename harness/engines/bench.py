"""What the client adds to the time that it reports for a request.

One mock server, requests of 64 tokens in 16 passes of 2 ms, in turn by ``EngineClient`` (time from
sent to last token) and by a bare client, which writes the request to a socket and reads to the last
byte without looking at what it reads. Both keep their connection.
"""

import http.client
import json
import statistics
import tempfile
import time
from typing import Any

from specpilot.harness.deployments.registry import load
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.client import EngineClient, SamplingParams
from specpilot.harness.engines.launch import launch_spec
from specpilot.harness.engines.process import ServerProcess, free_port

__all__ = ["run"]

PAIRS = 200
WARMUP = 8
PARAMS = SamplingParams(max_new_tokens=64, ignore_eos=True)


def run() -> list[dict[str, Any]]:
    """Median over ``PAIRS`` pairs of (client - bare client), with quartiles as low and high."""
    deployment = load("mock")
    prompts = load_workload("mock", 128).prompts("open", PAIRS + WARMUP, b"bench")
    settings = {"delay_ms": 2.0, "row_ms": 0.0, "tokens_per_pass": 4}
    with tempfile.TemporaryDirectory() as folder:
        spec = launch_spec(deployment, settings, "candidate", free_port(), run_dir=folder)
        with ServerProcess(spec) as server, EngineClient(spec.base_url) as client:
            server.wait_healthy(60)
            bare = http.client.HTTPConnection(spec.host, spec.port)
            bare_s, client_s = [], []
            for i, prompt in enumerate(prompts):
                if i % 2:
                    bare_s.append(_bare_seconds(bare, prompt))
                client_s.append(client.generate(prompt, PARAMS).seconds)
                if not i % 2:
                    bare_s.append(_bare_seconds(bare, prompt))
            bare.close()
    bare_s, client_s = bare_s[WARMUP:], client_s[WARMUP:]
    added = [1e3 * (ours - theirs) for ours, theirs in zip(client_s, bare_s, strict=True)]
    low, median, high = statistics.quantiles(added, n=4)
    return [
        {
            "id": "controller.client_overhead_ms",
            "value": median,
            "low": low,
            "high": high,
            "unit": "ms",
            "repeats": added,
            "note": f"{PAIRS} pairs in alternating order; low and high are quartiles of the pairs",
        },
        {
            "id": "controller.bare_client_ms",
            "value": 1e3 * statistics.median(bare_s),
            "unit": "ms",
            "note": "the same requests by the bare client",
        },
    ]


def _bare_seconds(connection: http.client.HTTPConnection, prompt: tuple[int, ...]) -> float:
    body = json.dumps({"input_ids": prompt, "sampling_params": PARAMS.body(), "stream": True})
    started = time.perf_counter()
    connection.request("POST", "/generate", body)
    connection.getresponse().read()
    return time.perf_counter() - started
