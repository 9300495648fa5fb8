import pytest

from specpilot.errors import InvalidInput, Unsupported
from specpilot.memory.transfer import plan_port
from specpilot.types import StepShares

PICO = {
    "deployment": "pico", "engine": "reference", "drafter": "block", "drafter_top_k": 16,
    "target_arch": "hybrid-gdn", "requests": 1, "gpu_arch": "cpu", "weight_dtype": "float32",
    "speculation": "chain", "block": 8,
}  # fmt: skip
PRO = {
    "engine": "sglang", "engine_version": "0.5.20", "drafter": "dflash2", "drafter_top_k": 16,
    "target_family": "qwen3.8", "target_arch": "hybrid-gdn", "requests": 1, "gpu_arch": "sm_120",
    "smem_per_block_kb": 99, "weight_dtype": "bf16", "target_params_b": 27,
}  # fmt: skip
H100_BATCHED = PRO | {
    "requests": 24, "gpu_arch": "sm_90", "weight_dtype": "bf16", "smem_per_block_kb": 227,
}  # fmt: skip
SINGLE = StepShares(weights=0.8, lm_head=0.05, gdn=0.03, attention=0.02, drafter=0.07,
                    overhead=0.03)  # fmt: skip
BATCHED = StepShares(weights=0.4, lm_head=0.05, gdn=0.2, attention=0.1, drafter=0.2, overhead=0.05)


def names(steps):
    return [step.entry for step in steps]


def test_pico_gets_patches_in_the_order_of_the_cost_model(seeded):
    def predict(mechanism, params):
        return 2 - params["rows"] / 32 if mechanism == "best_first_tree" else 1.55

    plan = plan_port(seeded, PICO, predict=predict)
    expected = [predict(idea.mechanism, idea.params) for idea in plan.patches]
    assert [idea.predicted for idea in plan.patches] == expected
    trees = [idea for idea in plan.patches if idea.mechanism == "best_first_tree"]
    assert {idea.params["rows"] for idea in trees} == {8, 12, 16, 24}
    assert [i.predicted for i in trees] == sorted((i.predicted for i in trees), reverse=True)
    assert {"pairwise_selector"} == {i.mechanism for i in plan.patches} - {"best_first_tree"}
    step = next(step for step in plan.steps if step.entry == "best-first-tree")
    assert (step.predicted, step.basis) == (1.75, "the cost model")


def test_a_predictor_without_an_opinion_leaves_the_reports(seeded):
    def refuses(mechanism, params):
        raise Unsupported("no model of this machine")

    for predict in (None, refuses, lambda mechanism, params: float("nan")):
        plan = plan_port(seeded, PICO, predict=predict)
        step = next(step for step in plan.steps if step.entry == "best-first-tree")
        assert step.basis.startswith("reports elsewhere")
        assert 1 < step.predicted < 1.467
        assert {idea.predicted for idea in plan.patches} == {None}


def test_the_single_request_plan_on_sm120_is_the_order_that_the_paper_found(seeded):
    plan = plan_port(seeded, PRO, SINGLE)
    order = names(plan.steps)
    assert order.index("best-first-tree") < order.index("two-level-verification")
    assert order.index("w12-weight-format") < order.index("two-level-verification")
    assert order.index("gdn-tree-wy-verify") < order.index("best-first-tree")
    assert "shared-node-budget" in names(plan.blocked)


def test_the_plan_says_what_needs_porting_to_sm120(seeded):
    plan = plan_port(seeded, PRO, SINGLE)
    porting = {step.entry: " ".join(step.porting) for step in plan.steps}
    assert "wgmma" in porting["w12-weight-format"]
    assert "99 KB" in porting["best-first-tree"]


def test_negative_results_of_the_regime_pull_a_mechanism_down_and_are_named(seeded):
    plan = plan_port(seeded, H100_BATCHED, BATCHED, limit=20)
    tree = next(step for step in (*plan.steps, *plan.blocked) if step.entry == "best-first-tree")
    assert tree.unmet == (
        "requests <= 8.0 (rows stop being free when many requests share the pass)",
    )
    assert "two-level-verification" in names(plan.blocked)
    expected = {step.entry: step.predicted for step in plan.steps}
    for entry in ("shared-node-budget", "per-request-block", "prompt-admission"):
        assert expected[entry] > expected.get("best-first-tree", 1.0)
    assert {hit.kind for hit in plan.negatives} == {"negative_result"}


def test_unknown_facts_are_said_and_to_be_found_out_first(seeded):
    plan = plan_port(seeded, {"requests": 1, "weight_dtype": "bf16", "gpu_arch": "sm_90"})
    tree = next(step for step in plan.steps if step.entry == "best-first-tree")
    assert any(text.startswith("drafter_top_k >= 2") for text in tree.unknown)
    assert tree.cheapest_evidence.startswith("Find out drafter_top_k, drafter first.")
    assert any(text.startswith("drafter:") for text in plan.unknown_facts)


def test_the_regime_that_nobody_tested_is_named(seeded):
    plan = plan_port(seeded, PICO)
    tree = next(step for step in plan.steps if step.entry == "best-first-tree")
    assert "gpu_arch: reported for sm_90, sm_120, here cpu" in tree.untested
    assert any(text.startswith("trees-at-few-requests") for text in tree.untested)


def test_what_is_in_the_stack_is_not_planned_again(seeded):
    plan = plan_port(seeded, PRO, SINGLE, stack=("best-first-tree", "w12-weight-format"))
    assert not {"best-first-tree", "w12-weight-format"} & set(names(plan.steps))
    tlv = next(step for step in plan.steps if step.entry == "two-level-verification")
    assert any("(in the stack)" in text for text in tlv.requires)


def test_the_gap_moves_its_term_up(seeded):
    tokens = plan_port(seeded, PRO, SINGLE, gap={"tokens": 3.0, "kernel": 1.0, "overhead": 1.0})
    kernel = plan_port(seeded, PRO, SINGLE, gap={"tokens": 1.0, "kernel": 3.0, "overhead": 1.0})

    def place(plan, entry):
        return names(plan.steps).index(entry)

    assert place(tokens, "best-first-tree") < place(tokens, "w12-weight-format")
    assert place(kernel, "split-kv-verify-attention") <= place(tokens, "split-kv-verify-attention")
    assert place(kernel, "best-first-tree") >= place(tokens, "best-first-tree")


def test_a_step_whose_requirement_cannot_be_met_here_is_lowered_and_says_so(seeded):
    plan = plan_port(seeded, PRO | {"weight_dtype": "fp16"}, SINGLE, limit=20)
    order = names(plan.steps)
    assert order.index("best-first-tree") < order.index("two-level-verification")
    assert "w12-weight-format" in names(plan.blocked)
    tlv = next(step for step in plan.steps if step.entry == "two-level-verification")
    assert any("w12-weight-format" in text and "not possible here" in text for text in tlv.warnings)


def test_a_gain_that_nobody_isolated_is_called_unknown(seeded):
    plan = plan_port(seeded, PRO, SINGLE, limit=20)
    step = next(step for step in plan.steps if step.entry == "gdn-tree-wy-verify")
    assert (step.predicted, step.basis) == (1.0, "unknown: no report isolates it")


def test_an_empty_memory_plans_nothing(store):
    assert plan_port(store, PICO).steps == ()


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        ({"engine": 3}, {}), ({"speed": 1}, {}), (PICO, {"limit": 0}),
        (PICO, {"gap": {"tokens": -1.0}}), (PICO, {"gap": {"luck": 2.0}}),
        (PICO, {"gap": {"tokens": float("inf")}}),
    ],
)  # fmt: skip
def test_bad_input_is_refused(seeded, facts, more):
    with pytest.raises(InvalidInput):
        plan_port(seeded, facts, **more)
