from specpilot.memory.bench import run


def test_the_benchmark_measures_search_at_both_sizes():
    results = {row["id"]: row for row in run(rounds=1, large=300)}
    assert results["memory.entries"]["value"] >= 140
    for id in ("memory.search_p95_ms.200", "memory.search_p95_ms.300", "memory.get_p95_ms"):
        row = results[id]
        assert row["unit"] == "ms"
        assert 0 < row["low"] <= row["value"] <= row["high"]
