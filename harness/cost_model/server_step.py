"""The step of a live server, by a client's clock: the measured side of a ceiling's gap.

Works on any engine behind the native HTTP subset. Streams greedy requests, as many at once as asked
for, and divides the time between first and last token by the exact passes in between. Prefill is
not in it. Counts of passes are the server's own, so this informs the cost model and nothing else:
the controller never believes them.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from specpilot.errors import EngineFailure, InvalidInput
from specpilot.harness.engines.client import EngineClient, Generation, SamplingParams

__all__ = ["ServerStep", "measure_server_step"]


@dataclass(frozen=True, slots=True)
class ServerStep:
    """Median over requests: time of a step in ms, and tokens per exact pass (bonus included)."""

    requests: int
    step_ms: float
    tokens_per_pass: float


def measure_server_step(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    *,
    output_tokens: int,
    requests: int = 1,
) -> ServerStep:
    """Run ``prompts`` with ``requests`` of them in flight and return the typical step.

    Raises:
        InvalidInput: no prompts, fewer than two output tokens, or no requests.
        EngineFailure: a reply holds no interval between tokens.
    """
    if not prompts or output_tokens < 2 or requests < 1:
        raise InvalidInput(
            f"fields 'prompts' ({len(prompts)}), 'output_tokens' {output_tokens} and 'requests' "
            f"{requests}: need a prompt, two tokens and one request at least."
        )
    params = SamplingParams(max_new_tokens=output_tokens, ignore_eos=True)
    with ThreadPoolExecutor(requests) as pool:
        done = list(pool.map(lambda prompt: client.generate(tuple(prompt), params), prompts))
    steps = [_step(one) for one in done]
    return ServerStep(
        requests,
        statistics.median(ms for ms, _ in steps),
        statistics.median(tokens for _, tokens in steps),
    )


def _step(one: Generation) -> tuple[float, float]:
    emitted = len(one.output_ids) - 1  # the first token comes from the prefill
    passes = int(one.meta.get("spec_verify_ct") or emitted)
    seconds = one.last_token_s - one.first_token_s
    if emitted < 1 or not seconds > 0:
        raise EngineFailure(
            f"a reply of {len(one.output_ids)} tokens took {seconds:.6f} s from first to last.",
            hint="Ask for more output tokens; does the server stream?",
        )
    return seconds * 1e3 / passes, emitted / passes
