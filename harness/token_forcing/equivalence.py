"""Is speculative decoding the same distribution? Three levels, as one command.

    python -P -m specpilot.harness.token_forcing.equivalence --deployment pico

1. *Exact law*: each acceptance rule on a toy target, every random outcome enumerated; total
   variation to plain decoding below 1e-12.
2. *Monte Carlo at a fixed prefix*: independent draws of three tokens, one-sample chi-square against
   the exact law; and rules that are known to be wrong must be rejected.
3. *Sequences of the real model*: the deployment's plain decoding against its speculative system,
   over HTTP: greedy and keyed outputs token for token, and the tests of law on the system's text.

Level 3 asks for equal tokens where that can be asked (fp32 and fp64). In bf16 roundings part
texts at near-ties; there it reports the share of equal outputs, the law decides for sampled text
and an audit (``audit``) for greedy text.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specpilot.harness.deployments import registry
from specpilot.harness.deployments.health import read_config
from specpilot.harness.deployments.workload import load_workload
from specpilot.harness.engines.client import EngineClient, Generation, SamplingParams
from specpilot.harness.token_forcing.exact_law import (
    RULES,
    ToyModel,
    emit,
    law_of,
    total_variation,
)
from specpilot.harness.token_forcing.sampling import (
    LawTest,
    LawVerdict,
    SamplingLaw,
    chi_square,
    detectable_effect,
    holm,
    law_suite,
)
from specpilot.harness.token_forcing.scorer import Scorer
from specpilot.harness.token_forcing.servers import serving
from specpilot.mechanisms.trees.acceptance import Coin, RandomCoin, Walk, chain_ratio
from specpilot.types import Deployment

__all__ = ["Equivalence", "Sequences", "exact_level", "monte_carlo_level", "run", "sequence_level"]

TOLERANCE = 1e-12
LEVEL = 0.01
DRAWS = 20_000
SEED = 20_260_807
PROMPT_KEY = b"specpilot equivalence"


def wrong_draft_law(model: ToyModel, coin: Coin) -> Walk:
    """A known error: the ratio is taken with another temperature than the drafts were drawn at."""
    first = coin.draw(model.q[()])
    drafts = (first, coin.draw(model.q[(first,)]))
    contexts = [drafts[:d] for d in range(3)]
    q = np.stack([model.q[c] ** 0.7 / (model.q[c] ** 0.7).sum() for c in contexts[:2]])
    return chain_ratio(drafts, q, np.stack([model.p[c] for c in contexts]), coin)


def wrong_recovery(model: ToyModel, coin: Coin) -> Walk:
    """A known error: after a rejection the token is drawn from the target, not the residual."""
    draft = coin.draw(model.q[()])
    if coin.accept(float(model.p[()][draft] / model.q[()][draft])):
        return Walk((0, 1), (draft, coin.draw(model.p[(draft,)])))
    return Walk((0,), (coin.draw(model.p[()]),))


WRONG = {"draft law of another temperature": wrong_draft_law, "no residual": wrong_recovery}


@dataclass(frozen=True, slots=True)
class Sequences:
    """Level 3: outputs of the speculative system against plain decoding. ``exact`` says whether
    equality token for token is asked for."""

    requests: int
    tokens: int
    exact: bool
    greedy_identical: int
    keyed_identical: int
    law: LawVerdict

    @property
    def passed(self) -> bool:
        same = self.greedy_identical == self.keyed_identical == self.requests
        return not self.law.rejected and (same or not self.exact)


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The outcome of all levels. ``total_variation`` by rule; ``monte_carlo`` with Holm over the
    rules; ``wrong`` p-values of the rules that must be rejected; ``detectable`` the smallest
    effect size w that level 2 finds with power 0.8."""

    passed: bool
    total_variation: Mapping[str, float]
    monte_carlo: tuple[LawTest, ...]
    wrong: tuple[LawTest, ...]
    detectable: float
    sequences: Sequences | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def exact_level(vocab_size: int = 4) -> dict[str, float]:
    """Level 1: each rule's total variation to plain decoding over three tokens."""
    model = ToyModel(vocab_size, 3, SEED)
    plain = model.plain()
    return {
        name: total_variation(law_of(partial(emit, model, rule)), plain)
        for name, rule in RULES.items()
    }


def monte_carlo_level(
    draws: int = DRAWS, vocab_size: int = 5
) -> tuple[tuple[LawTest, ...], tuple[LawTest, ...], float]:
    """Level 2: tests of the right rules, of the wrong ones, and the detectable effect size."""
    model = ToyModel(vocab_size, 3, SEED + 1)
    plain = model.plain()
    place = {text: i for i, text in enumerate(plain)}
    law = np.array(list(plain.values()))

    def test(name: str, rule: Any) -> LawTest:
        rng = np.random.default_rng([SEED, len(name)])
        coin = RandomCoin(rng)
        seen = np.zeros(len(law), dtype=np.int64)
        for _ in range(draws):
            seen[place[emit(model, rule, coin)]] += 1
        return chi_square(seen, law, name)

    right = holm([test(name, rule) for name, rule in RULES.items()])
    wrong = tuple(test(name, rule) for name, rule in WRONG.items())
    return right, wrong, detectable_effect(draws, len(law) - 1)


def sequence_level(
    plain: EngineClient,
    system: EngineClient,
    scorer: Scorer,
    prompts: Sequence[tuple[int, ...]],
    *,
    tokens: int,
    exact: bool,
    law: SamplingLaw | None = None,
) -> Sequences:
    """Level 3 on running servers: ``plain`` decodes without speculation, ``scorer`` is stock."""
    law = law or SamplingLaw()

    def outputs(client: EngineClient, temperature: float) -> list[Generation]:
        def one(job: tuple[int, tuple[int, ...]]) -> Generation:
            seed, prompt = job
            params = SamplingParams(
                max_new_tokens=tokens,
                temperature=temperature,
                top_k=law.top_k,
                ignore_eos=True,
                sampling_seed=seed,
            )
            return client.generate(prompt, params)

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, enumerate(prompts)))

    def identical(temperature: float) -> tuple[int, list[Generation]]:
        ours, theirs = outputs(system, temperature), outputs(plain, temperature)
        same = sum(a.output_ids == b.output_ids for a, b in zip(ours, theirs, strict=True))
        return same, ours

    greedy, _ = identical(0.0)
    keyed, sampled = identical(law.temperature)
    verdict = law_suite(sampled, scorer, law, level=LEVEL)
    return Sequences(len(prompts), verdict.tokens, exact, greedy, keyed, verdict)


def run(
    deployment: Deployment | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    requests: int = 48,
    tokens: int = 128,
    draws: int = DRAWS,
) -> Equivalence:
    """Run the levels: the first two always, the third if a ``deployment`` is given.

    ``settings`` are those of the speculative system (default: the deployment's stock). Raises
    ``EngineFailure`` if one of its servers does not start.
    """
    variation = exact_level()
    right, wrong, detectable = monte_carlo_level(draws)
    sequences = None
    if deployment is not None:
        workload = load_workload(deployment.workload, deployment.regime.prompt_tokens)
        prompts = workload.prompts("open", requests, PROMPT_KEY)
        vocab_size = int(read_config(Path(deployment.target))["vocab_size"])
        with (
            serving(deployment, "ar", {}) as plain,
            serving(deployment, "candidate", settings or {}) as system,
            serving(deployment, "scorer", {}) as scorer,
        ):
            sequences = sequence_level(
                plain,
                system,
                Scorer(scorer, vocab_size),
                prompts,
                tokens=tokens,
                exact=deployment.dtype != "bfloat16",
            )
    passed = (
        max(variation.values()) < TOLERANCE
        and min(t.adjusted_p for t in right) >= LEVEL
        and max(t.p for t in wrong) < LEVEL
        and (sequences is None or sequences.passed)
    )
    return Equivalence(passed, variation, right, wrong, detectable, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--deployment", default=None, help="with level 3 on this deployment")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the system, as JSON")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    deployment = registry.load(options.deployment) if options.deployment else None
    if deployment is not None and options.dtype:
        deployment = replace(deployment, dtype=options.dtype)
    found = run(deployment, options.settings, requests=options.requests, tokens=options.tokens)
    print(json.dumps(found.to_dict(), indent=1))
    raise SystemExit(0 if found.passed else 1)


if __name__ == "__main__":
    main()
