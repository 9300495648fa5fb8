"""Start stock SGLang on one GPU and record what it emits greedily for some prompts.

Two servers, one after the other or side by side: plain decoding, and DFLASH with the drafter. The
output ids and accept lengths go to a JSON file, so that the other engines can be held against them.
SGLang lives in a folder of its own (``--site``), which becomes the server's PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from specpilot.errors import EngineFailure
from specpilot.harness.deployments.pico.sglang import write_drafter

__all__ = ["main"]

FLAGS = [
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
    "--linear-attn-backend",
    "triton",
    "--grammar-backend",
    "none",
    "--disable-radix-cache",
    "--mem-fraction-static",
    "0.2",
    "--context-length",
    "4096",
    "--max-running-requests",
    "16",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--disable-prefill-cuda-graph",
    "--cuda-graph-bs-decode",
    "1",
    "--dtype",
    "bfloat16",
]


def start(
    site: Path, target: Path, drafter: Path | None, block: int, port: int, log: Path
) -> subprocess.Popen:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS]
    if drafter is not None:
        command += ["--speculative-algorithm", "DFLASH"]
        command += ["--speculative-draft-model-path", str(drafter)]
        command += ["--speculative-dflash-block-size", str(block)]
    env = os.environ | {
        "PYTHONPATH": str(site),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_PLUGINS": "none",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        return subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def post(port: int, path: str, body: dict | None = None, timeout: float = 120) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return reply.read()


def wait_healthy(process: subprocess.Popen, port: int, deadline: float, log: Path) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineFailure(f"SGLang ended: {log.read_text()[-3000:]}")
        try:
            post(port, "/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise EngineFailure(f"SGLang was not ready in time: {log.read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, help="without it: plain decoding")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--prompts", type=Path, required=True, help="int .npy [n, tokens]")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=31001)
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    log = args.out.with_suffix(".log")
    if args.drafter:
        args.drafter = write_drafter(args.drafter, args.out.with_suffix(".drafter"))
    began = time.monotonic()
    process = start(args.site, args.target, args.drafter, args.block, args.port, log)
    try:
        wait_healthy(process, args.port, began + args.seconds, log)
        record: dict = {
            "speculation": "DFLASH" if args.drafter else "none",
            "block": args.block if args.drafter else None,
            "start_s": round(time.monotonic() - began, 1),
            "flags": FLAGS,
            "requests": [],
        }
        sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
        for prompt in np.load(args.prompts).tolist():
            body = {"input_ids": prompt, "sampling_params": sampling}
            sent = time.perf_counter()
            reply = json.loads(post(args.port, "/generate", body))
            seconds = time.perf_counter() - sent
            meta = reply["meta_info"]
            record["requests"].append(
                {
                    "prompt_ids": prompt,
                    "output_ids": reply["output_ids"],
                    "seconds": round(seconds, 4),
                    **{k: meta[k] for k in ("spec_verify_ct", "spec_accept_length") if k in meta},
                }
            )
        args.out.write_text(json.dumps(record))
        accepted = [r.get("spec_accept_length") for r in record["requests"]]
        print(
            "sglang", record["speculation"], record["start_s"], "s to start;", accepted, flush=True
        )
    finally:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


if __name__ == "__main__":
    main()
