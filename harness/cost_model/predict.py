"""What if: the step time and speed of a deployment under other settings, before anyone runs it.

Pass and draft times come from the deployment's calibration where there is one, else from bytes and
FLOPs with the prior of real kernels. τ (``tokens_per_pass``) is always an input, from replay or a
live run: no step model knows what a target will accept. A prediction ranks and rejects; only the
controller's measurement promotes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specpilot.errors import InvalidInput, Unsupported
from specpilot.harness.cost_model.calibrate import Calibration, load_calibration
from specpilot.harness.cost_model.ceiling import AcceptanceProfile, best_rows
from specpilot.harness.cost_model.drafters import DrafterShape, read_drafter
from specpilot.harness.cost_model.floors import check_regime, step_floor, total_ms
from specpilot.harness.cost_model.hardware import load_hardware
from specpilot.harness.cost_model.kernels import expected_step_ms
from specpilot.harness.cost_model.shapes import ModelShape
from specpilot.types import Deployment, Hardware

__all__ = [
    "Acceptance",
    "CostModel",
    "Prediction",
    "TwoLevel",
    "best_tree_rows",
    "predict",
    "read_settings",
    "row_price_ms",
    "two_level",
]

Speculation = Literal["none", "chain", "tree"]
Acceptance = Mapping[str, AcceptanceProfile]
"""τ by rows: ``"chain"``, ``"tree"``, ``"tree.16"`` (on a block of 16 rows, looked up first).

With the drafter's pairwise selector on (setting ``selector``) each has ``pairwise_`` before it.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A deployment's expected step under some settings. Times in ms; speed of all requests.

    ``overhead_ms`` is the time that stock's step spends outside draft and pass, kept as it is.
    ``speedup_over_stock`` is None when stock's own τ is not known. ``basis`` says where times come
    from: ``calibrated`` (measured passes of this engine here) or ``modelled`` (bytes and FLOPs).
    """

    speculation: str
    block: int
    rows: int
    requests: int
    tokens_per_pass: float
    draft_ms: float
    pass_ms: float
    overhead_ms: float
    tokens_per_s: float
    speedup_over_ar: float
    speedup_over_stock: float | None
    basis: Literal["calibrated", "modelled"]
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        return self.draft_ms + self.pass_ms + self.overhead_ms


@dataclass(frozen=True)
class CostModel:
    """Everything that times a deployment: shapes, machine, and its calibration if there is one."""

    deployment: Deployment
    target: ModelShape
    drafter: DrafterShape | None
    hardware: Hardware
    calibration: Calibration | None = None

    @staticmethod
    def of(deployment: Deployment, calibration: Calibration | None = None) -> "CostModel":
        """Read the deployment's configs and machine; ``calibration`` None loads the stored one.

        Raises the errors of ``ModelShape.from_config``, ``read_drafter`` and ``load_hardware``.
        """
        target = ModelShape.from_config(deployment.target, dtype=deployment.dtype)
        drafter = None
        if deployment.drafter is not None:
            kind = deployment.drafter_kind or "dflash"
            drafter = read_drafter(deployment.drafter, kind, target, dtype=deployment.dtype)
        if calibration is None:
            calibration = load_calibration(deployment.id)
        hardware = (
            calibration.hardware
            if calibration is not None
            else load_hardware(deployment.hardware, deployment.id)
        )
        return CostModel(deployment, target, drafter, hardware, calibration)

    @property
    def basis(self) -> Literal["calibrated", "modelled"]:
        """Calibrated if the calibration timed the engine's passes."""
        measured = self.calibration is not None and bool(self.calibration.pass_ms)
        return "calibrated" if measured else "modelled"

    def pass_ms(self, rows: int) -> float:
        """Time of one exact pass over ``rows`` rows of each request.

        Calibrated passes are of one request: several requests take the time of as many rows in all,
        or, beyond the rows that were timed, grow as their floor does.
        """
        if self.basis == "modelled":
            return self._modelled(rows, 0)
        assert self.calibration is not None
        requests = self.deployment.regime.requests
        if rows * requests <= max(self.calibration.pass_ms):
            return self.calibration.pass_at(rows * requests)
        return self.calibration.pass_at(rows) * self._growth(rows, 0)

    def draft_ms(self, block: int) -> float:
        """Time of one draft of ``block`` rows for each request; 0 for no block."""
        if block == 0:
            return 0.0
        if self.drafter is None:
            raise InvalidInput(
                f"deployment {self.deployment.id!r} has no drafter, so nothing can be drafted.",
                hint="Predict speculation 'none', or give the deployment a drafter.",
            )
        if self.calibration is not None and self.calibration.draft_ms:
            return self.calibration.draft_at(block) * self._growth(1, block)
        return self._modelled(1, block) - self._modelled(1, 0)

    def _growth(self, rows: int, block: int) -> float:
        """Floor for the regime's requests over that for one: of the draft if ``block``, or pass."""
        component = "drafter" if block else None
        drafter = self.drafter if block else None

        def floor(requests: int) -> float:
            regime = replace(self.deployment.regime, requests=requests)
            parts = step_floor(self.target, drafter, self.hardware, regime, rows, block=block)
            return total_ms(parts, component)

        return floor(self.deployment.regime.requests) / floor(1)

    def with_weights(self, weight_format: str) -> "CostModel":
        """Return the model with the target's layers in another weight format (``"w12"``...).

        Calibrated pass times shrink by the ratio of the passes' floors: what the format saves if
        its kernels are as close to their floors as the present ones.
        """
        target = self.target.with_format(weight_format)
        calibration = self.calibration
        if calibration is not None:

            def ratio(rows: int) -> float:
                regime = replace(self.deployment.regime, requests=1)
                after = total_ms(step_floor(target, None, self.hardware, regime, rows))
                return after / total_ms(step_floor(self.target, None, self.hardware, regime, rows))

            times = {rows: ms * ratio(rows) for rows, ms in calibration.pass_ms.items()}
            calibration = replace(calibration, pass_ms=times)
        return replace(self, target=target, calibration=calibration)

    def _modelled(self, rows: int, block: int) -> float:
        regime = self.deployment.regime
        drafter = self.drafter if block else None
        if self.hardware.calibrated:
            # Measured bandwidth and rate are already what kernels reach here.
            parts = step_floor(self.target, drafter, self.hardware, regime, rows, block=block)
            return total_ms(parts)
        return expected_step_ms(self.target, drafter, self.hardware, regime, rows, block=block)


def read_settings(settings: Mapping[str, Any]) -> tuple[Speculation, int, int]:
    """Read (speculation, block, rows) as the reference engine does: a chain has block rows."""
    speculation = settings.get("speculation", "none")
    if speculation not in ("none", "chain", "tree"):
        raise Unsupported(
            f"speculation {speculation!r} is unknown.", hint="Known: none, chain, tree."
        )
    if speculation == "none":
        return "none", 0, 1
    block = settings.get("block", 8)
    rows = settings.get("rows") or block
    for name, value in (("block", block), ("rows", rows)):
        if type(value) is not int or value < 1:
            raise InvalidInput(f"setting {name!r} is {value!r}; it counts rows, anchor included.")
    if speculation == "chain" and rows > block:
        raise InvalidInput(
            f"setting 'rows' is {rows}, but a chain has no more rows than its block of {block}."
        )
    return speculation, block, rows


def _kind(settings: Mapping[str, Any], speculation: Speculation) -> str:
    """The first part of an acceptance key."""
    paired = speculation != "none" and settings.get("selector")
    return f"pairwise_{speculation}" if paired else speculation


def _profile(acceptance: Acceptance, speculation: str, block: int) -> AcceptanceProfile | None:
    return acceptance.get(f"{speculation}.{block}") or acceptance.get(speculation)


def _tokens(acceptance: Acceptance, speculation: str, block: int, rows: int) -> tuple[float, str]:
    """Return τ and where it comes from; ``speculation`` as ``_kind`` names it."""
    if speculation == "none":
        return 1.0, "one token a pass"
    found = _profile(acceptance, speculation, block)
    if found is None:
        raise InvalidInput(
            f"tokens_per_pass of a {speculation} on a block of {block} is not known for this "
            f"deployment; known: {', '.join(sorted(acceptance)) or 'nothing'}.",
            hint="Record lattices in a run and replay the policy, or give an acceptance profile.",
        )
    return found.at(rows), found.source


def predict(
    deployment: Deployment,
    settings: Mapping[str, Any],
    *,
    acceptance: Acceptance,
    weight_format: str | None = None,
    overhead_ms: float = 0.0,
    model: CostModel | None = None,
) -> Prediction:
    """Predict a deployment under engine settings (``speculation``, ``block``, ``rows``).

    ``settings`` are merged onto the deployment's stock settings. ``weight_format`` is a what-if on
    the target's matrices. ``overhead_ms`` is time for each step outside draft and pass, as measured
    on stock; AR keeps none of it. ``model`` saves reading configs again.

    Raises:
        InvalidInput: settings out of range, rows beyond the calibration, or τ unknown.
        NotFound: the deployment's machine is not known.
    """
    check_regime(deployment.regime)
    if overhead_ms < 0 or not math.isfinite(overhead_ms):
        raise InvalidInput(f"field 'overhead_ms' is {overhead_ms!r}; it must be 0 or more.")
    base = model or CostModel.of(deployment)
    changed = base.with_weights(weight_format) if weight_format else base
    merged = {**deployment.stock, **settings}
    speculation, block, rows = read_settings(merged)
    tokens, source = _tokens(acceptance, _kind(merged, speculation), block, rows)
    draft, verify = changed.draft_ms(block), changed.pass_ms(rows)
    overhead = overhead_ms if speculation != "none" else 0.0
    step = draft + verify + overhead
    requests = deployment.regime.requests
    ar = base.pass_ms(1)
    notes = [f"tokens_per_pass: {source}"]
    if weight_format:
        notes.append(f"target weights in {weight_format}; AR keeps its own")
    return Prediction(
        speculation=speculation,
        block=block,
        rows=rows,
        requests=requests,
        tokens_per_pass=tokens,
        draft_ms=draft,
        pass_ms=verify,
        overhead_ms=overhead,
        tokens_per_s=requests * tokens / step * 1e3,
        speedup_over_ar=tokens * ar / step,
        speedup_over_stock=_over_stock(base, acceptance, overhead_ms, tokens / step),
        basis=changed.basis,
        notes=tuple(notes),
    )


def _over_stock(
    base: CostModel, acceptance: Acceptance, overhead_ms: float, tokens_per_ms: float
) -> float | None:
    stock = base.deployment.stock
    speculation, block, rows = read_settings(stock)
    kind = _kind(stock, speculation)
    if speculation != "none" and _profile(acceptance, kind, block) is None:
        return None
    tokens, _ = _tokens(acceptance, kind, block, rows)
    step = base.draft_ms(block) + base.pass_ms(rows)
    step += overhead_ms if speculation != "none" else 0.0
    return tokens_per_ms / (tokens / step)


def best_tree_rows(
    model: CostModel,
    profile: AcceptanceProfile,
    *,
    block: int,
    rows: Sequence[int],
    overhead_ms: float = 0.0,
) -> int:
    """Return the tree size, among the ``rows`` that the engine has, with the most tokens per ms."""
    draft = model.draft_ms(block) + overhead_ms
    return best_rows(profile, rows, lambda r: draft + model.pass_ms(r))


def row_price_ms(step_ms: Callable[[int], float], rows: int, sizes: Sequence[int]) -> float:
    """Return what one more row costs at ``rows`` rows in all, in ms, to the next of ``sizes``.

    A node pays if its path probability exceeds price × tokens per ms (SpecPilot paper, batching;
    algorithm: Dinkelbach's ratio form). 0 means that the next size is free.
    """
    larger = [s for s in sizes if s > rows]
    if not larger:
        raise InvalidInput(f"no size above {rows} rows among {sorted(sizes)}.")
    following = min(larger)
    return max(0.0, (step_ms(following) - step_ms(rows)) / (following - rows))


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Two-level verification, modelled: tokens per exact pass, cycle time, gain over one level."""

    tokens_per_pass: float
    cycle_ms: float
    gain: float


def two_level(
    tokens_per_pass: float, agreement: float, *, draft_ms: float, q_ms: float, exact_ms: float
) -> TwoLevel:
    """Predict two drafts for each exact pass, the first checked by a cheap low-precision Q pass.

    With Q agreement ``a`` a position, a chain of c = τ tokens survives the exact pass to its end
    with a^c and then the second draft adds τ: tokens = Σ a^i (i = 1..c) + a^c τ + (1 - a^c).
    c is interpolated between whole numbers. One level takes ``draft_ms + exact_ms`` for τ tokens,
    two take ``2 draft_ms + q_ms + exact_ms`` (the exact pass's extra rows are taken as free: give
    the ``exact_ms`` of the larger pass where they are not).
    """
    if tokens_per_pass < 1:
        raise InvalidInput(f"tokens_per_pass is {tokens_per_pass}; it counts the bonus.")
    if not 0 < agreement <= 1:
        raise InvalidInput(f"field 'agreement' is {agreement}; it must lie in (0, 1].")
    if min(draft_ms, q_ms) < 0 or exact_ms <= 0:
        raise InvalidInput("times of draft, Q pass and exact pass cannot be negative.")
    whole, part = divmod(tokens_per_pass, 1.0)
    survived = sum(agreement**i for i in range(1, int(whole) + 1))
    survived += part * agreement ** (whole + 1)
    end = agreement**tokens_per_pass
    tokens = survived + end * tokens_per_pass + (1 - end)
    cycle = 2 * draft_ms + q_ms + exact_ms
    single = tokens_per_pass / (draft_ms + exact_ms)
    return TwoLevel(tokens, cycle, tokens / cycle / single)
