"""MIG: placements are those that slices allow, plans hold what is requested, and Kubernetes' checks accept them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from motet.benchmarks.papers import mig as mig_benchmark
from motet.benchmarks.rigs.published_bases import BASES, published_base
from motet.cluster.commands.cli import main
from motet.cluster.tools.file_problems import file_problems
from motet.cluster.tools.mig import (
    MIG_GPUS,
    ModelDemand,
    Placement,
    Profile,
    choose,
    fewest_gpus,
    is_valid,
    mig_manifests,
    pack,
    placement_of,
    plan,
    whole_mixes,
    whole_placements,
)

A100 = MIG_GPUS["A100 SXM 80GB"]
SMALL = tuple(profile for profile in A100.profiles if profile.name != "1g.20gb")
slices = st.dictionaries(st.sampled_from(A100.profiles), st.integers(1, 9), max_size=6)
demands = st.builds(
    ModelDemand,
    st.just("m"),
    st.floats(1e8, 6e10),
    st.floats(1e3, 5e5),
    st.floats(1e8, 1e11),
    st.integers(1, 300),
    st.integers(1, 8000),
    st.floats(0.02, 1.0),
)


@pytest.mark.parametrize("name", MIG_GPUS)
def test_a_gpu_is_cut_in_19_ways_or_78(name: str) -> None:
    profiles = MIG_GPUS[name].profiles
    without = tuple(profile for profile in profiles if (profile.compute_slices, profile.memory_slices) != (1, 2))
    assert (len(whole_placements(without)), len(whole_placements(profiles))) == (19, 78)


def test_these_are_all_ways() -> None:
    """By trying every subset of the places, without 1g.20gb."""
    places = [(profile, start) for profile in SMALL for start in profile.starts]
    valid = set[Placement]()
    for number in range(1, 8):
        for chosen in itertools.combinations(places, number):
            placement = tuple(sorted(chosen, key=lambda each: each[1]))
            if sum(profile.memory_slices for profile, _ in chosen) <= 8 and is_valid(placement):
                valid.add(placement)

    def can_grow(placement: Placement) -> bool:
        return any(is_valid((*placement, place)) for place in places)

    assert set(whole_placements(SMALL)) == {placement for placement in valid if not can_grow(placement)}


def test_placements_that_nvidia_documents() -> None:
    starts = {profile.name: profile.starts for profile in A100.profiles}
    assert starts == {
        "1g.10gb": (0, 1, 2, 3, 4, 5, 6),
        "1g.20gb": (0, 2, 4, 6),
        "2g.20gb": (0, 2, 4),
        "3g.40gb": (0, 4),
        "4g.40gb": (0,),
        "7g.80gb": (0,),
    }
    three, four = A100.profile("3g.40gb"), A100.profile("4g.40gb")
    assert not is_valid(((four, 4),)) and not is_valid(((three, 0), (four, 0)))
    assert placement_of(Counter([three, four])) == ((four, 0), (three, 4))
    assert placement_of(Counter([four, four])) is None
    with pytest.raises(ValueError, match="'5g' is not a profile of A100 SXM 80GB"):
        A100.profile("5g")


@given(slices)
def test_packings_are_valid_hold_everything_and_no_fewer_would_do(wanted: dict[Profile, int]) -> None:
    found = pack(wanted, A100)
    assert all(is_valid(placement) for placement in found)
    assert sum((Counter(profile for profile, _ in placement) for placement in found), Counter()) == Counter(wanted)
    least = fewest_gpus(wanted, A100)
    assert least <= len(found) <= least + 2


@given(slices, st.sampled_from(A100.profiles))
def test_one_slice_more_never_needs_fewer(wanted: dict[Profile, int], profile: Profile) -> None:
    more = Counter(wanted) + Counter([profile])
    assert fewest_gpus(wanted, A100) <= fewest_gpus(more, A100) <= fewest_gpus(wanted, A100) + 1


@given(st.sampled_from(whole_mixes(A100.profiles)))
def test_what_fits_one_gpu_needs_one(mix: Counter[Profile]) -> None:
    assert fewest_gpus(mix, A100) == len(pack(mix, A100)) == 1
    assert placement_of(mix) is not None


@given(demands)
def test_more_users_never_take_less(demand: ModelDemand) -> None:
    try:
        chosen = choose(demand, A100)
    except ValueError:
        assert demand.most_users(A100.profile("7g.80gb").device(A100.device)) == 0
        return
    device = chosen.profile.device(A100.device)
    assert chosen.users * chosen.num_gangs >= demand.users
    assert demand.weights_bytes + chosen.users * demand.context * demand.kv_bytes <= device.memory_bytes
    more = choose(replace(demand, users=demand.users + 1), A100)
    taken = [each.num_gangs * each.profile.memory_slices for each in (chosen, more)]
    computed = [each.num_gangs * each.profile.compute_slices for each in (chosen, more)]
    assert max(taken[0] / 8, computed[0] / 7) <= max(taken[1] / 8, computed[1] / 7) + 1e-9
    larger = [demand.most_users(profile.device(A100.device)) for profile in A100.profiles]
    assert larger[-1] == max(larger)


def test_capacity_alone_allows_many_more_users_than_are_published() -> None:
    for (demand, name, users), most in zip(mig_benchmark.PUBLISHED, (33, 33, 179), strict=True):
        device = A100.profile(name).device(A100.device)
        assert replace(demand, objective_s=1e9).most_users(device, 1.0) == most > users
    demand, name, users = mig_benchmark.PUBLISHED[0]
    assert demand.most_users(A100.profile(name).device(A100.device)) == users


def test_a_plan_is_what_kubernetes_and_motet_take() -> None:
    models = [replace(mig_benchmark.MISTRAL, name=f"seven-{number}") for number in range(3)]
    found = plan([*models, replace(mig_benchmark.FLAN_T5_XL, name="three", users=20)], A100)
    manifests = mig_manifests(found, gpus_per_node=2)
    config = yaml.safe_load(manifests.config_map["data"]["config.yaml"])
    assert set(manifests.node_configs) == set(config["mig-configs"])
    cut: Counter[str] = Counter()
    for name in manifests.node_configs:
        indices = [index for part in config["mig-configs"][name] for index in part["devices"]]
        assert indices == [0, 1]
        for part in config["mig-configs"][name]:
            cut.update(part.get("mig-devices", {}))
            mix = Counter({A100.profile(each): number for each, number in part.get("mig-devices", {}).items()})
            assert placement_of(mix) is not None
    assert cut == Counter(each.profile.name for each in found.gangs for _ in range(each.num_gangs))
    assert sum(manifests.settings[each.model]["min-gangs"] for each in found.gangs) == cut.total()
    for settings in manifests.settings.values():
        assert settings["resource"][0].startswith("nvidia.com/mig-")
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        assert file_problems(text, is_toml=True) == []
    with pytest.raises(ValueError, match="gpus_per_node = 0"):
        mig_manifests(found, 0)


def test_what_cannot_be_planned_is_refused() -> None:
    huge = ModelDemand.of("huge", published_base("Llama-2-70B"), 1, 1000)
    with pytest.raises(ValueError, match="huge: no profile of A100 SXM 80GB"):
        plan([huge], A100)
    with pytest.raises(ValueError, match="each model is named once"):
        plan([mig_benchmark.MISTRAL] * 2, A100)
    with pytest.raises(ValueError, match="are above 0"):
        replace(huge, users=0)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASES["Mistral-7B"]))
    file = tmp_path / "models.toml"
    file.write_text('[[models]]\nname = "a"\npath = "base"\nusers = 8\ncontext = 1000\n')
    shown = CliRunner().invoke(main, ["mig", str(file)])
    assert shown.exit_code == 0 and "1 GPUs; these slices need 1 at least" in shown.output
    document = json.loads(CliRunner().invoke(main, ["mig", str(file), "--json"]).output)
    assert document["node_labels"] == [{"nvidia.com/mig.config": "motet-mig-0"}]
    assert document["settings"]["a"]["gang-num-gpus"] == 1
    for wrong, said in (
        ("", "has to have a table"),
        ('[[models]]\nname = "a"\n', "are accepted"),
        ('[[models]]\nname = "a"\npath = "base"\nusers = "8"\ncontext = 1\n', "whole numbers"),
        ('[[models]]\nname = "a"\npath = "none"\nusers = 8\ncontext = 1\n', "has no config.json"),
        ("[[models", "Expected"),
    ):
        file.write_text(wrong)
        refused = CliRunner().invoke(main, ["mig", str(file)])
        assert refused.exit_code == 1 and said in refused.output
