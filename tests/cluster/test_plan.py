"""`motet plan`: a plan is monotone, its gangs lie where they may, and the deployment's checks accept its settings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.rigs.published_bases import BASES, published_base
from motet.cluster.commands.cli import main
from motet.cluster.tools.file_problems import file_problems
from motet.cluster.tools.gang_capacity import Adapters, GangCapacity, Objectives, Spread, Traffic
from motet.cluster.tools.serving_planner import ServingPlan, best, options
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.trace_files import write_trace
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.replay import TracedRequest
from motet.workers.costs.step_costs import StepCosts, StepShape

H100, A100 = DEVICES["H100 SXM"], DEVICES["A100 SXM 80GB"]
MODELS = tuple(published_base(name) for name in ("Llama-3-8B", "Mixtral-8x7B"))

spreads = st.builds(Spread, st.integers(1, 3000), st.integers(0, 2000))
answers = st.builds(Spread, st.integers(1, 800), st.integers(0, 400))
adapters = st.builds(
    Adapters.by_power_law, st.integers(0, 300), st.floats(0, 2), st.sampled_from([(8,), (8, 64), (16, 32)])
)
traffics = st.builds(Traffic, st.floats(0.01, 200), spreads, answers, adapters)
objectives = st.builds(Objectives, st.floats(0.2, 5), st.floats(0.02, 0.2))


def devices(model: Any, traffic: Traffic, wanted: Objectives, **given: Any) -> float:
    """Of the best plan; infinite: there is none."""
    plans, _ = options(model, H100, traffic, wanted, **given)
    return best(plans).num_devices if plans else float("inf")


@settings(max_examples=24)
@given(
    st.sampled_from(MODELS),
    traffics,
    objectives,
    st.sampled_from(["requests", "prompt", "answer", "deviation", "adapters", "rank", "first", "interval"]),
    st.floats(1.01, 3),
)
def test_a_plan_is_monotone(model: Any, traffic: Traffic, wanted: Objectives, what: str, more: float) -> None:
    """More traffic, longer requests, more adapters or stricter objectives never need fewer devices."""
    prompt, answer, known = traffic.prompt, traffic.answer, traffic.adapters
    harder, stricter = traffic, wanted
    match what:
        case "requests":
            harder = replace(traffic, requests_per_s=more * traffic.requests_per_s)
        case "prompt":
            harder = replace(traffic, prompt=Spread(more * prompt.mean, more * prompt.deviation))
        case "answer":
            harder = replace(traffic, answer=Spread(more * answer.mean, more * answer.deviation))
        case "deviation":
            harder = replace(traffic, answer=replace(answer, deviation=answer.deviation + 100 * more))
        case "adapters":
            number = len(known.shares)
            harder = replace(traffic, adapters=Adapters.by_power_law(int(more * number) + 1, 0, known.ranks))
            traffic = replace(traffic, adapters=Adapters.by_power_law(number, 0, known.ranks))
        case "rank":
            harder = replace(traffic, adapters=replace(known, ranks=tuple(rank + 8 for rank in known.ranks)))
        case "first":
            stricter = replace(wanted, first_token_s=wanted.first_token_s / more)
        case "interval":
            stricter = replace(wanted, token_interval_s=wanted.token_interval_s / more)
    assert devices(model, harder, stricter) >= devices(model, traffic, wanted)


@settings(max_examples=40)
@given(traffics, st.floats(0.01, 20), st.integers(1, 200), st.integers(1, 200))
def test_more_adapters_take_no_less_of_a_pool(traffic: Traffic, arrivals: float, number: int, more: int) -> None:
    """Of as many requests in a step, whose adapters are all alike."""
    ranks = traffic.adapters.ranks
    few, many = (replace(traffic, adapters=Adapters.by_power_law(each, 0, ranks)) for each in (number, number + more))
    states = [GangCapacity(MODELS[0], H100, 1, each, Objectives()).at(arrivals) for each in (few, many)]
    assert 0 < states[0].adapter_bytes <= states[1].adapter_bytes * (1 + 1e-9)
    assert states[0].limits.pool <= states[1].limits.pool * (1 + 1e-9)


@settings(max_examples=40)
@given(traffics, st.floats(0, 60), st.floats(0, 60))
def test_a_prompt_beside_more_sequences_is_no_sooner(traffic: Traffic, few: float, more: float) -> None:
    gang = GangCapacity(MODELS[0], H100, 1, traffic, Objectives(), max_tokens_per_step=64)
    first, second = (gang._first_token_s(num_sequences, 0.05, 0.5) for num_sequences in (few, few + more))
    assert first <= second * (1 + 1e-9)


@settings(max_examples=10)
@given(traffics, objectives, st.sampled_from(["flops_per_s", "bytes_per_s", "memory_bytes", "network_bytes_per_s"]))
def test_a_better_device_never_serves_less(traffic: Traffic, wanted: Objectives, name: str) -> None:
    better = replace(A100, **{name: 1.5 * getattr(A100, name)})
    for degree in (1, 4):
        most = [GangCapacity(MODELS[0], each, degree, traffic, wanted).highest_load() for each in (A100, better)]
        rates = [0.0 if state is None else state.requests_per_s for state in most]
        assert rates[1] >= rates[0] * (1 - 1e-9)


@settings(max_examples=10)
@given(st.sampled_from(MODELS), traffics, objectives, st.sampled_from([4, 8]), st.floats(0, 10))
def test_plans_are_valid(model: Any, traffic: Traffic, wanted: Objectives, per_node: int, price: float) -> None:
    plans, refused = options(model, H100, traffic, wanted, per_node, price)
    assert sorted([*[plan.degree for plan in plans], *refused]) == [1, 2, 4, 8][: 3 + (per_node == 8)]
    for plan in plans:
        check_plan(plan, traffic)
    assert all(gain >= -1e-9 for plan in plans[:1] for _, gain in plan.gains())


def check_plan(plan: ServingPlan, traffic: Traffic) -> None:
    taken = [(place.node, device) for place in plan.places for device in place.devices]
    assert len(taken) == len(set(taken)) == plan.num_devices
    assert all(len(place.devices) == plan.degree for place in plan.places)
    assert all(0 <= device < plan.devices_per_node for _, device in taken)
    assert plan.num_gangs * plan.peak.requests_per_s >= traffic.requests_per_s * (1 - 1e-9)
    assert (plan.num_gangs - 1) * plan.peak.requests_per_s < traffic.requests_per_s, "a gang too many"
    assert plan.peak.limits.binding()[1] <= 1 and plan.state.limits.binding()[1] <= 1 + 1e-9
    assert plan.state.kv_bytes + plan.state.adapter_bytes <= plan.gang.pool_bytes
    assert plan.state.requests_per_s == pytest.approx(traffic.requests_per_s / plan.num_gangs, rel=1e-6)
    assert plan.max_num_sequences <= plan.settings["max-tokens-per-step"]


def test_what_binds_is_what_gives_more() -> None:
    """More of the resource that ends a gang gives more, and more of what is idle nothing."""
    traffic = Traffic(10, Spread(1000), Spread(200))
    (plan, *_), _ = options(MODELS[0], H100, traffic, Objectives(100, 0.03))
    gains = dict(plan.gains())
    assert plan.peak.limits.binding()[0] == "token interval" and gains["token interval"] > 0.02
    assert gains["network"] == gains["memory"] == 0
    loose = Objectives(100, 100)
    (plan, *_), _ = options(MODELS[0], H100, traffic, loose)
    assert plan.peak.limits.binding()[0] in ("pool", "prompts", "step tokens")
    long_ = Traffic(10, Spread(4000), Spread(2000))
    (plan, *_), _ = options(published_base("Llama-2-7B"), H100, long_, loose)
    gains = dict(plan.gains())
    assert plan.peak.limits.binding()[0] == "pool" and gains["memory"] > 0 == gains["token interval"]


def test_a_gang_by_hand() -> None:
    """One sequence at a time of a tiny rate: a step reads the weights, and KV once."""
    gang = GangCapacity(MODELS[0], H100, 1, Traffic(1e-6, Spread(1), Spread(1)), Objectives(), 1.0)
    nothing = gang.at(1e-9)
    assert nothing.requests_per_s * nothing.step_s == pytest.approx(1e-9)
    weights_s = 2 * 7.5e9 / H100.bytes_per_s  # without the embedding
    assert gang._step(1, 0, 1)[0] == pytest.approx(weights_s, rel=0.02)
    with pytest.raises(ValueError, match="cannot hold the base"):
        GangCapacity(published_base("Llama-2-70B"), H100, 1, gang.traffic, gang.objectives)
    with pytest.raises(ValueError, match="share"):
        GangCapacity(MODELS[0], H100, 3, gang.traffic, gang.objectives)


@given(adapters, st.floats(1, 500), st.floats(0, 400))
def test_popularity(known: Adapters, num_sequences: float, resident: float) -> None:
    assert 0 <= known.num_used(num_sequences) <= min(len(known.shares), num_sequences) + 1e-6
    assert 0 <= known.missed(resident) <= 1 + 1e-9
    assert known.missed(resident + 1) <= known.missed(resident)
    assert known.missed(len(known.shares)) == 0


def base(folder: Path, name: str = "Llama-3-8B") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASES[name]))
    return folder


class _Page(HTMLParser):
    """Which tags are open, and whether anything is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.num_pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.num_pictures += tag == "svg"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command(tmp_path: Path) -> None:
    model, page = base(tmp_path / "llama <3>"), tmp_path / "page.html"
    options_ = ["--requests-per-s", "40", "--adapters", "500", "--rank", "8", "--rank", "64"]
    options_ += ["--device", "H100 SXM", "--device", "A100 SXM 80GB", "--price", "H100 SXM", "2.5"]
    options_ += ["--price", "A100 SXM 80GB", "1.5", "--html", str(page)]
    ran = CliRunner().invoke(main, ["plan", str(model), *options_])
    assert ran.exit_code == 0, ran.output
    assert re.search(r"what ends a gang: [a-z ]+; next", ran.output) and "a million tokens" in ran.output
    found = json.loads(CliRunner().invoke(main, ["plan", str(model), *options_, "--json"]).output)
    first = found["plans"][0]
    assert first["devices"] == first["gangs"] * first["degree"] == sum(len(p["devices"]) for p in first["places"])
    assert first["price_of_million_answer_tokens"] == min(p["price_of_million_answer_tokens"] for p in found["plans"])
    efficiencies = {p["device"]: p["efficiency"] for p in found["plans"]}
    assert efficiencies == {"H100 SXM": 0.6, "A100 SXM 80GB": 0.5}  # measured, and assumed
    assert f"an efficiency of {first['efficiency']}" in ran.output
    given = CliRunner().invoke(main, ["plan", str(model), *options_, "--json", "--efficiency", "0.7"])
    assert {p["efficiency"] for p in json.loads(given.output)["plans"]} == {0.7}
    parser = _Page()
    parser.feed(page.read_text())
    assert parser.open == [] and parser.num_pictures == 4 and "&lt;3&gt;" in page.read_text()
    text = "".join(f"{key} = {value}\n" for key, value in first["settings"].items())
    assert file_problems(text, is_toml=True) == []


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    model, trace = base(tmp_path / "llama"), tmp_path / "trace.jsonl"
    write_trace(trace, [TracedRequest(number / 5, 300, 20, f"t/{number % 3}") for number in range(30)])
    ran = CliRunner().invoke(main, ["plan", str(model), "--trace", str(trace), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    (replayed,) = found["replayed"].values()
    assert replayed["requests answered"] == 30 and replayed["refused"] == {}
    assert replayed["token interval s, 95 %"] <= 0.05 and replayed["first token s, 95 %"] <= 2
    assert found["plans"][0]["gangs"] == 1


def test_a_trace_with_times_of_this_machine(tmp_path: Path) -> None:
    """Measured on a tiny base, whose folder then needs its config.json alone."""
    model, kept, trace = write_model("llama", tmp_path / "tiny"), tmp_path / "costs.json", tmp_path / "trace.jsonl"
    measured = CliRunner().invoke(main, ["costs", str(model), "--measure", str(kept)])
    assert measured.exit_code == 0, measured.output
    found = StepCosts.read(kept)
    assert found.model == "tiny" and found.num_steps > 100 and found.shape_s(StepShape(1, 1, 1, 1)) > 0
    write_trace(trace, [TracedRequest(number / 100, 20, 8, f"a{number % 3}", "t") for number in range(20)])
    options_ = ["plan", str(model), "--trace", str(trace), "--costs", str(kept), "--gangs", "2", "--json"]
    first, again = (CliRunner().invoke(main, options_) for _ in range(2))
    assert first.exit_code == 0 and first.output == again.output, "virtual time is not the clock's"
    (replayed,) = json.loads(first.output)["replayed"].values()
    assert replayed["requests answered"] == 20 and replayed["output tokens/s"] > 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((model / "config.json").read_text())
    other = CliRunner().invoke(main, ["plan", str(tmp_path / "other"), *options_[2:]])
    assert other.exit_code == 1 and "the costs are of tiny, not of other" in other.output


def test_what_the_command_refuses(tmp_path: Path) -> None:
    model, trace = base(tmp_path / "llama", "Llama-2-70B"), tmp_path / "trace.jsonl"
    write_trace(trace, [TracedRequest(0.0, 300, 20)] * 3)
    for given_options, problem in (
        ([], "give --requests-per-s"),
        (["--trace", str(trace)], "arrive at once"),
        (["--requests-per-s", "1", "--prompt-tokens", "9000"], "tokens of a mean request"),
        (["--requests-per-s", "1", "--device", "A100 SXM 40GB", "--devices-per-node", "2"], "cannot hold the base"),
        (["--trace", str(trace), "--costs", str(trace)], "no measured costs"),
    ):
        ran = CliRunner().invoke(main, ["plan", str(model), *given_options])
        assert ran.exit_code != 0 and problem in ran.output, ran.output


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", b"[]", "no JSON object"),
        ("config.json", b"\xff{", "is no JSON"),
        ("config.json", b"[" * 100_000, "is no JSON"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("config.json", {"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000"),
        ("config.json", {"vocab_size": None}, "vocab_size = None"),
        ("config.json", {"hidden_size": "4096"}, "hidden_size = '4096'"),
        ("config.json", {"rope_scaling": [1]}, "rope_scaling = [1]: an object is needed"),
        ("config.json", {"rms_norm_eps": {}}, "rms_norm_eps = {}: a number above 0"),
        ("config.json", {"architectures": 3}, "architectures = 3: a list with one name"),
        ("trace.jsonl", b"\xff\n", "line 1"),
        ("trace.jsonl", b'{"arrival_s": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "line 1"),
        ("trace.jsonl", b'{"arrival_s": 1, "prompt_tokens": 1%s, "output_tokens": 1}' % (b"0" * 400), "line 1"),
        ("trace.jsonl", b'{"arrival_s": 1, "prompt_tokens": 10000000000, "output_tokens": 1}', "from 1 to"),
        ("costs.json", {"dtype": "float7"}, "float7"),
        ("costs.json", {"device": "abacus"}, "abacus"),
        ("costs.json", {"num_threads": 0}, "threads"),
        ("costs.json", {"coefficients": [1.0]}, "coefficients"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, file: str, content: Any, problem: str) -> None:
    model = base(tmp_path / "llama")
    trace, kept = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    write_trace(trace, [TracedRequest(0.0, 300, 20), TracedRequest(1.0, 300, 20)])
    coefficients = (1e-4,) * len(StepShape().features)
    fields: dict[str, Any] = {"model": "llama", "machine": "m", "device": "cpu", "num_threads": 1, "dtype": "bfloat16"}
    fields |= {"coefficients": coefficients, "store_load_s": 0, "store_page_s": 0, "copy_page_s": 0}
    fields |= {"residual": 0, "num_steps": 16}
    kept.write_text(json.dumps(fields))
    wrong = model / file if file == "config.json" else tmp_path / file
    if isinstance(content, dict):
        content = json.dumps(json.loads(wrong.read_text()) | content).encode()
    arguments = ["plan", str(model), "--trace", str(trace)] + (["--costs", str(kept)] if file == "costs.json" else [])
    assert CliRunner().invoke(main, arguments).exit_code == 0
    wrong.write_bytes(content)
    ran = CliRunner().invoke(main, arguments)
    assert isinstance(ran.exception, SystemExit) and ran.exit_code == 1 and problem in ran.output, ran


def test_very_many_adapters_and_very_long_prompts_take_no_time_and_no_memory(tmp_path: Path) -> None:
    model, trace = base(tmp_path / "llama"), tmp_path / "trace.jsonl"
    write_trace(trace, [TracedRequest(float(number), 300 if number else 1 << 31, 20) for number in range(9)])
    kept = tmp_path / "costs.json"
    StepCosts(
        model="llama",
        machine="m",
        device="cpu",
        num_threads=1,
        dtype="bfloat16",
        coefficients=(1e-4,) * len(StepShape().features),
        store_load_s=0,
        store_page_s=0,
        copy_page_s=0,
        residual=0,
        num_steps=16,
    ).write(kept)
    ran = CliRunner().invoke(main, ["plan", str(model), "--trace", str(trace), "--costs", str(kept), "--json"])
    (replayed,) = json.loads(ran.output)["replayed"].values()
    assert replayed["requests answered"] == 8 and sum(replayed["refused"].values()) == 1
    many = Adapters.by_power_law(300_000, 1.0)
    assert sum(many.shares) == pytest.approx(1.0) and many.shares[1] == pytest.approx(many.shares[0] / 2)
    with pytest.raises(ValueError, match="at most"):
        Adapters.by_power_law(10**9, 1.0)
