"""The requests that the server takes: SGLang's native ``/generate``, the part we serve.

Strict and closed: an option that this server does not know is refused by its name, so that a
caller never believes that it took effect.
"""

import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot.errors import InvalidInput
from specpilot.harness.engines.backend import GenerateRequest, ScoreRequest

__all__ = ["Batch", "parse_generate"]

Ids = Annotated[list[int], Field(fail_fast=True)]
MAX_BATCH = 1024


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", frozen=True)


class Sampling(Strict):
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    max_new_tokens: int = Field(default=128, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Ids | None = None
    sampling_seed: int | None = Field(default=None, ge=0, lt=2**63)


class Generate(Strict):
    input_ids: Ids | Annotated[list[Ids], Field(fail_fast=True)]
    sampling_params: Sampling | list[Sampling] = Sampling()
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: Ids | list[Ids] | None = None
    return_text_in_logprobs: bool = False


class Batch:
    """A checked request body: either all to be generated or all to be scored.

    ``single`` tells whether the body held one list of ids (reply: an object) or a list of lists
    (reply: a list). ``scores`` hold ``start`` one past ``logprob_start_len``.
    """

    def __init__(self, body: Generate) -> None:
        ids = body.input_ids
        self.single = not ids or isinstance(ids[0], int)
        prompts: list[list[int]] = [ids] if self.single else ids  # type: ignore[list-item,assignment]
        if not prompts or not all(prompts):
            raise InvalidInput("input_ids: an empty prompt; give at least one token id.")
        if len(prompts) > MAX_BATCH:
            raise InvalidInput(f"input_ids: {len(prompts)} prompts, at most {MAX_BATCH}.")
        n = len(prompts)
        sampling = spread(body.sampling_params, n, "sampling_params")
        rids = spread(body.rid, n, "rid") if isinstance(body.rid, list) or n == 1 else [None] * n
        self.rids: list[str] = [rid or uuid.uuid4().hex for rid in rids]
        self.stream = body.stream
        self.generations: list[GenerateRequest] = []
        self.scores: list[ScoreRequest] = []
        if len({s.max_new_tokens == 0 for s in sampling}) > 1:
            raise InvalidInput(
                "sampling_params: max_new_tokens 0 (scoring) and above 0 in one batch."
            )
        if sampling[0].max_new_tokens > 0:
            if body.return_logprob:
                raise InvalidInput(
                    "return_logprob: log-probs of generated tokens are not served; score the "
                    "output with max_new_tokens 0."
                )
            self.generations = [
                generate_request(*item) for item in zip(self.rids, prompts, sampling, strict=True)
            ]
            return
        if not body.return_logprob:
            raise InvalidInput("max_new_tokens: 0 asks for scoring, which needs return_logprob.")
        if body.stream:
            raise InvalidInput("stream: scoring (max_new_tokens 0) has nothing to stream.")
        if body.return_text_in_logprobs:
            raise InvalidInput("return_text_in_logprobs: this server has no tokenizer.")
        starts = spread(body.logprob_start_len, n, "logprob_start_len")
        tops = spread(body.top_logprobs_num, n, "top_logprobs_num")
        extra: Any = body.token_ids_logprob or []
        extras = extra if extra and isinstance(extra[0], list) else [extra] * n
        self.scores = [
            score_request(*item)
            for item in zip(
                prompts, starts, tops, spread(extras, n, "token_ids_logprob"), strict=True
            )
        ]


def parse_generate(raw: bytes) -> Batch:
    """Read the JSON body of ``/generate``. Raises ``InvalidInput`` that names the wrong field."""
    try:
        body = Generate.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidInput(explain(error)) from error
    return Batch(body)


def explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    if first["type"] == "extra_forbidden":
        return f"{name}: this server does not know the option; leave it out."
    if first["loc"][:1] == ("input_ids",):
        return "input_ids: give a list of token ids (integers) or a list of such lists."
    return f"{name or 'body'}: {first['msg']} (got {str(first['input'])[:60]!r})."


def spread(value: Any, n: int, name: str) -> list[Any]:
    values = value if isinstance(value, list) else [value] * n
    if len(values) != n:
        raise InvalidInput(f"{name}: {len(values)} values for {n} prompts.")
    return values


def generate_request(rid: str, ids: list[int], sampling: Sampling) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=tuple(ids),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.sampling_seed or 0,
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        ignore_eos=sampling.ignore_eos,
    )


def score_request(ids: list[int], start: int, top: int, extra: list[int]) -> ScoreRequest:
    first = len(ids) - 1 if start == -1 else start
    if not 0 <= first < len(ids):
        raise InvalidInput(f"logprob_start_len: {start} for a prompt of {len(ids)} tokens.")
    if top < 0:
        raise InvalidInput(f"top_logprobs_num: {top} is negative.")
    return ScoreRequest(tuple(ids), first + 1, top, tuple(extra))
