"""Draw ``curves.json`` as ``curves.png``: losses over tokens and steps, tau over steps."""

import argparse
import json
from pathlib import Path

__all__ = ["draw"]


def draw(source: Path, image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = json.loads(source.read_text())
    target, drafter = curves["target"], curves["drafter"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for axes, points, x, unit, names in (
        (left, target, "tokens", 1e6, ("train_loss", "heldout_loss")),
        (middle, drafter, "step", 1, ("train_loss",)),
        (right, drafter, "step", 1, ("chain_tau.block8", "oracle_tau.block8")),
    ):
        for name in names:
            kept = [p for p in points if name in p]
            axes.plot([p[x] / unit for p in kept], [p[name] for p in kept], marker=".", label=name)
        axes.grid(alpha=0.3)
        axes.legend()
    left.set(title="target", xlabel="tokens, millions", ylabel="nats a token", ylim=(1.2, 2.6))
    middle.set(title="drafter", xlabel="step", ylabel="weighted cross entropy", ylim=(0.8, 3))
    right.set(title="drafter, held-out", xlabel="step", ylabel="tokens a pass")
    figure.savefig(image, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    draw(args.source, args.image)


if __name__ == "__main__":
    main()
