"""Checks of what an audit is given, before anything is scored."""

from collections.abc import Collection, Sequence

from specpilot.harness.token_forcing.failures import AuditFailure
from specpilot.harness.token_forcing.margins import TimedOutput, ids_digest

__all__ = ["check_lengths", "check_prompts"]


def check_prompts(
    stock: Sequence[TimedOutput], system: Sequence[TimedOutput], recorded: Collection[str] | None
) -> None:
    """Both arms answer the same prompts, and only recorded ones (``ids_digest``).

    Raises ``AuditFailure`` of kind ``arms_differ`` or ``prompt_differs``.
    """
    if not stock or not system:
        raise AuditFailure(
            "arms_differ", f"{len(stock)} stock and {len(system)} system outputs to audit."
        )
    digests = [[ids_digest(o.prompt_ids) for o in arm] for arm in (stock, system)]
    for name, arm in zip(("Stock", "System"), digests, strict=True):
        for index, digest in enumerate(arm):
            if recorded is not None and digest not in recorded:
                raise AuditFailure(
                    "prompt_differs",
                    f"{name} request {index} has the prompt {digest[:12]}, which was not recorded.",
                    request=index,
                )
    if set(digests[0]) != set(digests[1]):
        raise AuditFailure(
            "arms_differ",
            f"The arms share {len({*digests[0]} & {*digests[1]})} of "
            f"{len({*digests[0]} | {*digests[1]})} prompts.",
            hint="Audit both arms on the same prompts.",
        )


def check_lengths(
    name: str,
    arm: Sequence[TimedOutput],
    max_new_tokens: int | None,
    stop_token_ids: Collection[int] | None,
) -> None:
    """Every output ended as it says: at ``max_new_tokens``, or at one of ``stop_token_ids``.

    What is None is not checked. Raises ``AuditFailure`` of kind ``empty_output`` or
    ``truncated_output``.
    """
    for index, output in enumerate(arm):
        tokens = len(output.output_ids)
        wrong = ""
        if not tokens:
            raise AuditFailure(
                "empty_output", f"{name} request {index} has no output.", request=index
            )
        if output.finish_reason not in ("stop", "length"):
            wrong = f"ended with {output.finish_reason!r}"
        elif max_new_tokens is not None and tokens > max_new_tokens:
            wrong = f"has {tokens} tokens of at most {max_new_tokens}"
        elif output.finish_reason == "length" and max_new_tokens not in (None, tokens):
            wrong = f"ended by length after {tokens} of {max_new_tokens} tokens"
        elif (
            output.finish_reason == "stop"
            and stop_token_ids is not None
            and output.output_ids[-1] not in stop_token_ids
        ):
            wrong = f"stopped at token {output.output_ids[-1]}, which is no stop token"
        if wrong:
            raise AuditFailure(
                "truncated_output", f"{name} request {index} {wrong}.", request=index
            )
