"""The whole training in one command, phase by phase, each under its time limit.

Corpus and target start together (kernels compile while the text is read); then the continuations,
the drafter, the evaluation and, where SGLang's folder is given, its record. Each phase is a process
of its own and resumes from ``--work``; what matters is copied to ``--out`` after each.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np

__all__ = ["main"]

HERE = __package__


class Phases:
    def __init__(self, work: Path, out: Path) -> None:
        self.work, self.out, self.began = work, out, time.monotonic()
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)

    def start(self, module: str, arguments: list[object], gpus: list[int]) -> subprocess.Popen:
        launcher = [sys.executable, "-u", "-P"]
        if len(gpus) > 1:
            launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={len(gpus)}"]
            launcher += [f"--master-port={29500 + gpus[0]}"]
        command = [*launcher, "-m", f"{HERE}.{module}", *map(str, arguments)]
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "PYTHONSAFEPATH": "1",
        }
        self.say(f"{module} starts on GPU {env['CUDA_VISIBLE_DEVICES']}")
        return subprocess.Popen(command, env=env)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def finish(self, *processes: subprocess.Popen) -> bool:
        codes = [p.wait() for p in processes]
        self.pack()
        if any(codes):
            self.say(f"a phase failed: exit codes {codes}")
        return not any(codes)

    def pack(self) -> None:
        """Copy weights and a tar of everything small, whole files at a time."""
        for name, folder in (("target", "target/target"), ("drafter", "drafter/drafter")):
            weights = self.work / folder / "model.safetensors"
            if weights.exists():
                shutil.copy(weights, self.out / f"{name}.safetensors")
        small = [
            *self.work.glob("corpus/*.json"),
            self.work / "corpus/heldout.npy",
            *self.work.glob("*/*/config.json"),
            *self.work.glob("*/*_curve.json"),
            *self.work.glob("*.json"),
            *self.work.glob("*.log"),
            *self.work.glob("*.npy"),
        ]
        with tarfile.open(self.out / "small.tar.gz", "w:gz") as tar:
            for path in small:
                if path.exists():
                    tar.add(path, path.relative_to(self.work))


def heldout_prompts(path: Path, count: int, tokens: int, seed: int) -> np.ndarray:
    held_out = np.load(path)
    starts = np.random.default_rng(seed).integers(len(held_out) - tokens, size=count)
    return held_out[starts[:, None] + np.arange(tokens)].astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="checkpoints, survives a call")
    parser.add_argument("--out", type=Path, required=True, help="what is brought home")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--target-gpus", type=int, default=0, help="0: all of them")
    parser.add_argument("--seconds-target", type=float, default=480)
    parser.add_argument("--seconds-continuations", type=float, default=60)
    parser.add_argument("--seconds-drafter", type=float, default=300)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--sglang", type=Path, help="folder of stock SGLang 0.5.20")
    parser.add_argument("--phases", default="corpus,target,continuations,drafter,evaluate,sglang")
    args = parser.parse_args()
    phases = Phases(args.work, args.out)
    todo = args.phases.split(",")
    work, everything = args.work, list(range(args.gpus))
    corpus, target, drafter = work / "corpus", work / "target/target", work / "drafter/drafter"

    opening = []
    if "corpus" in todo:
        opening.append(phases.start("corpus", [corpus, "--workers", args.workers], [0]))
    if "target" in todo:
        options = ["--corpus", corpus, "--work", work / "target", "--seconds", args.seconds_target]
        gpus = list(range(args.target_gpus or args.gpus))
        opening.append(phases.start("train_target", options, gpus))
    if opening and not phases.finish(*opening):
        raise SystemExit(1)
    if "continuations" in todo:
        options = ["--corpus", corpus, "--target", target, "--out", work / "shards"]
        options += ["--seconds", args.seconds_continuations]
        started = [phases.start("continuations", [*options, "--seed", g], [g]) for g in everything]
        if not phases.finish(*started):
            raise SystemExit(1)
    closing = []
    if "sglang" in todo and args.sglang:
        prompts = work / "sglang_prompts.npy"
        np.save(prompts, heldout_prompts(corpus / "heldout.npy", 16, 128, seed=4))
        sglang = ["--site", args.sglang, "--target", target, "--prompts", prompts]
        # Plain decoding needs no drafter: its slow start hides behind the training.
        plain = [*sglang, "--out", work / "sglang_ar.json", "--port", 31001]
        closing.append(phases.start("sglang_check", plain, [args.gpus - 1]))
    if "drafter" in todo:
        options = ["--corpus", corpus, "--target", target, "--shards", work / "shards"]
        options += ["--work", work / "drafter", "--seconds", args.seconds_drafter]
        if not phases.finish(phases.start("train_drafter", options, everything)):
            raise SystemExit(1)
    if "sglang" in todo and args.sglang:
        chain = [*sglang, "--out", work / "sglang_dflash8.json", "--port", 31101]
        chain += ["--drafter", drafter, "--block", 8]
        closing.append(phases.start("sglang_check", chain, [args.gpus - 1]))
    if "evaluate" in todo:
        options = ["--corpus", corpus, "--target", target, "--drafter", drafter]
        closing.append(phases.start("evaluate", [*options, "--out", work / "results.json"], [0]))
    done = phases.finish(*closing)
    phases.say("done" if done else "the closing phase failed")
    raise SystemExit(0 if done else 1)


if __name__ == "__main__":
    main()
