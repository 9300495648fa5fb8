"""An audit as a picture: mismatch rates with intervals, the limit, verdict and events above.

After the SpecPilot paper's Figure 4. The same in text for a terminal. Reads verdicts as the ledger
keeps them (``Verdict.to_dict``), so that a picture can be made of any receipt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot.errors import InvalidInput, Unsupported

__all__ = ["Bar", "bars", "draw", "text"]

WIDTH = 40


@dataclass(frozen=True, slots=True)
class Bar:
    """One arm: its mismatch rate with limits (shares of tokens), and what stands above its bar.

    ``limit`` is stock's rate plus the allowed excess; None for stock itself.
    """

    label: str
    rate: float
    low: float
    high: float
    limit: float | None
    caption: str


def bars(verdicts: Mapping[str, Mapping[str, Any]]) -> tuple[Bar, ...]:
    """Return stock's bar and one for each verdict, by label.

    Stock's bar is that of the first verdict. Raises ``InvalidInput`` for a verdict without rates:
    an audit that could not be carried out has no picture.
    """
    found: list[Bar] = []
    for label, verdict in verdicts.items():
        rate, events = verdict.get("rate"), verdict.get("events")
        bound = rate.get("bound") if rate else None
        if not rate or not bound or not events:
            reasons = " ".join(verdict.get("reasons", ())) or "it has no rates."
            raise InvalidInput(f"The audit of {label!r} cannot be drawn: {reasons}")
        if not found:
            found.append(
                Bar(
                    "stock",
                    bound["stock_rate"],
                    bound["stock_low"],
                    bound["stock_high"],
                    None,
                    _events(events, "stock_"),
                )
            )
        found.append(
            Bar(
                label,
                bound["rate"],
                bound["rate_low"],
                bound["rate_high"],
                bound["stock_rate"] + rate["limit"],
                f"{verdict['status']}, {_events(events, '')}",
            )
        )
    if not found:
        raise InvalidInput("There is no verdict to draw.")
    return tuple(found)


def _events(events: Mapping[str, Any], arm: str) -> str:
    count, left, audited = (events[f"{arm}{x}"] for x in ("events", "unexplained", "audited"))
    return f"{count} event{'' if count == 1 else 's'}, {left} of {audited} unexplained"


def text(found: Sequence[Bar]) -> str:
    """Draw the bars with characters: ``=`` up to the rate, ``-`` the interval, ``|`` the limit."""
    top = max([b.high for b in found] + [b.limit or 0.0 for b in found]) or 1.0
    labels = max(len(b.label) for b in found)
    lines = []
    for bar in found:
        cells = [" "] * (WIDTH + 1)
        for i in range(_cell(bar.low, top), _cell(bar.high, top) + 1):
            cells[i] = "-"
        for i in range(_cell(bar.rate, top)):
            cells[i] = "="
        if bar.limit is not None:
            cells[_cell(bar.limit, top)] = "|"
        rate = f"{bar.rate:7.3%} [{bar.low:.3%}, {bar.high:.3%}]"
        lines.append(f"{bar.label:<{labels}} {''.join(cells)} {rate}  {bar.caption}")
    lines.append(f"{'':<{labels}} tokens that mismatch stock; '-' interval, '|' limit")
    return "\n".join(lines)


def _cell(value: float, top: float) -> int:
    return round(value / top * WIDTH)


def draw(found: Sequence[Bar], file: Path) -> Path:
    """Write the bars to ``file`` (.png, .svg or .pdf) and return it.

    Raises ``Unsupported`` where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(
            "Pictures need matplotlib, which is not installed.",
            hint="pip install 'matplotlib>=3.9,<4', or use the text form.",
        ) from error
    figure = Figure(figsize=(1.6 + 1.5 * len(found), 3.4), layout="constrained")
    axes = figure.subplots()
    for x, bar in enumerate(found):
        color = "0.6" if bar.limit is None else ("C0" if bar.caption.startswith("pass") else "C3")
        below, above = max(bar.rate - bar.low, 0.0), max(bar.high - bar.rate, 0.0)
        axes.bar(x, 100 * bar.rate, 0.6, color=color)
        axes.errorbar(
            x, 100 * bar.rate, [[100 * below], [100 * above]], color="black", capsize=4, lw=1
        )
        if bar.limit is not None:
            axes.hlines(100 * bar.limit, x - 0.42, x + 0.42, colors="black", linestyles="dashed")
        height = 100 * max(bar.high, bar.limit or 0.0)
        caption = bar.caption.replace(", ", "\n")
        axes.annotate(
            caption, (x, height), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(range(len(found)), [bar.label for bar in found])
    axes.set_ylabel("mismatch rate (% of tokens)")
    axes.margins(y=0.3)
    axes.set_ylim(bottom=0)
    figure.savefig(file, dpi=150)
    return file
