"""A round's report: the closing table, as text and as Markdown, from what the tools said.

Every figure comes from the final's receipt or the profile; nothing is computed anew but ratios of
predictions. Text of memory entries is quoted.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

__all__ = ["closing_table", "markdown", "results"]

_ARMS = (("ar", "AR"), ("stock", "stock"), ("final", "final"))


def closing_table(status: Mapping[str, Any]) -> Table:
    """AR, stock and final: tokens/s, τ, speedups with 95 % intervals."""
    final = status["final"]
    table = Table(title=f"Round {status['round']} on {status['deployment']}: {final['verdict']}")
    for name, justify in (("system", "left"), ("tokens/s", "right"), ("tau", "right"),
                          ("over AR", "right"), ("over stock", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in _rows(final):
        table.add_row(*row)
    return table


def markdown(round_: Mapping[str, Any]) -> str:
    """Return the whole report. ``round_`` holds status, ceiling, plan, isolation, learned, ..."""
    status, final = round_["status"], round_["status"]["final"]
    lines = [f"# Round {status['round']} on `{status['deployment']}`", ""]
    lines += [f"Verdict: **{final['verdict']}**. {final['reason']}", ""]
    lines += ["| system | tokens/s | τ | over AR | over stock |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(final)]
    lines += ["", *_how_measured(status, round_["isolation"]), "", "## Gap before the round", ""]
    lines += _gap(round_["ceiling"])
    lines += ["", "## Trials", ""]
    lines += ["| trial | patches | verdict | gain | lower bound | needed | τ | forcing |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [_trial(trial) for trial in status["trials"]]
    lines += [f"- {failure}" for failure in round_["failures"]]
    lines += ["", "## Memory", ""]
    lines += [f"- wrote `{entry}`" for entry in round_["learned"]] or ["- nothing new"]
    lines += ["", "## Receipts", ""]
    for what, receipt in _receipts(status):
        lines.append(f"- {what}: record {receipt['seq']}, sha256 `{receipt['hash']}`")
    return "\n".join(lines) + "\n"


def results(round_: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the round's figures in the format of benchmark files."""
    status, final = round_["status"], round_["status"]["final"]
    prefix = f"run.{status['deployment']}"
    rows: list[dict[str, Any]] = [
        {"id": f"{prefix}.seconds", "value": round(round_["seconds"], 1), "unit": "s"}
    ]
    interval = "low and high: two-sided 95 % interval over cycles"
    for key, name in (
        ("final_over_ar", "speedup_over_ar"),
        ("final_over_stock", "speedup_over_stock"),
        ("stock_over_ar", "stock_over_ar"),
    ):
        if key in final["speedups"]:
            rows.append(
                {"id": f"{prefix}.{name}", **final["speedups"][key], "unit": "ratio",
                 "note": interval}
            )  # fmt: skip
    for arm, name in _ARMS:
        for key, unit in (("tokens_per_s", "tokens/s"), ("tokens_per_pass", "tokens/pass")):
            if (value := final[key].get(arm)) is not None:
                rows.append({"id": f"{prefix}.{key}.{name.lower()}", "value": value, "unit": unit})
    rows += [
        {"id": f"{prefix}.promoted", "value": int(final["verdict"] == "promoted"), "unit": "bool",
         "note": f"{final['reason']} Isolation {round_['isolation']}; "
                 f"{final['requests']} requests an arm; forcing {_forcing(final['forcing'])}"}
    ]  # fmt: skip
    rows += [
        {"id": f"{prefix}.trial.{'+'.join(trial['patches'])}", "value": 1 + trial["gain"] / 100,
         "unit": "ratio",
         "note": f"over {trial['against']}: {trial['verdict']}, lower bound "
                 f"{trial['lower_bound']:+.1f} %, needed {trial['threshold']:+.1f} %"}
        for trial in status["trials"] if trial["gain"] is not None
    ]  # fmt: skip
    return rows


def _rows(final: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    over_ar = {"ar": "1.00", "stock": _ratio(final, "stock_over_ar"),
               "final": _ratio(final, "final_over_ar")}  # fmt: skip
    over_stock = {"ar": "", "stock": "1.00", "final": _ratio(final, "final_over_stock")}
    for arm, name in _ARMS:
        speed, tau = final["tokens_per_s"].get(arm), final["tokens_per_pass"].get(arm)
        yield (name, _number(speed, 1), _number(tau, 2), over_ar[arm], over_stock[arm])


def _ratio(final: Mapping[str, Any], key: str) -> str:
    found = final["speedups"].get(key)
    return (
        "" if found is None else f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value} %"


def _how_measured(status: Mapping[str, Any], isolation: str) -> list[str]:
    final = status["final"]
    sealed = "sealed" if final["sealed"] else "NOT sealed"
    patches = ", ".join(f"`{name}`" for name in final["patches"]) or "none (stock)"
    where = f"on the {sealed} set `{final['set']}`, isolation {isolation}"
    if final["requests"] is None:
        return [f"Final patches: {patches}. Nothing was timed {where}."]
    return [
        f"Final patches: {patches}. {final['requests']} requests an arm {where}. "
        f"Lower bound {_percent(final['lower_bound'])}, needed {_percent(final['threshold'])} "
        f"(A/A noise {_number(status['noise_percent'], 2)} %).",
        "",
        f"Token forcing: {_forcing(final['forcing'])}.",
    ]


def _forcing(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return "not run"
    coverage = verdict["coverage"]
    return (
        f"{verdict['status']} on {verdict['requests']} requests and {verdict['tokens']} tokens, "
        f"{verdict['mismatches']} mismatches (stock {verdict['stock_mismatches']}), true coverage "
        f"of the bound at that count {_number(coverage, 3) or 'unknown'}"
    )


def _gap(ceiling: Mapping[str, Any] | None) -> list[str]:
    if ceiling is None:
        return ["Not known: this deployment cannot be profiled here."]
    gap = ceiling["gap"]
    return [
        f"Ceiling {ceiling['speedup_over_ar']:.2f}× AR ({ceiling['rows']} rows, τ "
        f"{ceiling['tokens_per_pass']:.2f}, floor {ceiling['floor_ms']:.3f} ms). Stock's step of "
        f"{ceiling['step_ms']:.3f} ms is {gap['whole']:.2f}× below it: tokens "
        f"{gap['tokens']:.2f} × kernels {gap['kernel']:.2f} × overhead {gap['overhead']:.2f}.",
    ]


def _trial(trial: Mapping[str, Any]) -> str:
    tau = trial["tokens_per_pass"].get("candidate")
    cells = (
        trial["trial"], " + ".join(trial["patches"]), trial["verdict"],
        _percent(trial["gain"]), _percent(trial["lower_bound"]), _percent(trial["threshold"]),
        _number(tau, 2), (trial["forcing"] or {}).get("status", "not run"),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _receipts(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for trial in status["trials"]:
        yield f"trial {trial['trial']}", trial["receipt"]
    yield "final", status["final"]["receipt"]
