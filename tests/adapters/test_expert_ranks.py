from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.adapter import MAX_RANK, expert_entries, family_of_module, named_experts

UP = "experts.up_proj"


@given(st.dictionaries(st.integers(0, 127), st.integers(1, MAX_RANK), min_size=1), st.integers(128, 256))
def test_entries_say_each_expert_s_rank_and_stay_few(ranks: dict[int, int], num_experts: int) -> None:
    entries = expert_entries(UP, ranks, num_experts)
    assert {family_of_module(entry) for entry in entries} == {UP}
    assert len(entries) <= 9
    assert sum(map(len, entries)) < 9 * 20 + 128 * 4
    said = {expert: rank for entry, rank in entries.items() for expert in named_experts(entry) or range(num_experts)}
    assert said.keys() == ranks.keys()
    if len(set(ranks.values())) <= 8:
        assert said == ranks
    else:
        assert all(ranks[expert] <= rank < 2 * ranks[expert] <= 2 * MAX_RANK for expert, rank in said.items())


def test_experts_of_one_rank_are_one_entry_and_others_are_named() -> None:
    assert expert_entries(UP, dict.fromkeys(range(4), 8), 4) == {UP: 8}
    assert expert_entries(UP, dict.fromkeys(range(3), 8), 4) == {"experts.0-2.up_proj": 8}
    assert expert_entries(UP, {0: 8, 1: 8, 2: 4, 3: 8}, 4) == {"experts.0-1,3.up_proj": 8, "experts.2.up_proj": 4}
    assert named_experts("experts.0-1,3.up_proj") == (0, 1, 3)
    assert named_experts(UP) is named_experts("q_proj") is None
