"""The cost model: NanoFlow's table, laws of what operations need, and that it agrees with the code that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from motet.benchmarks import tensor_parallel
from motet.benchmarks.papers import long_prompts, nanoflow
from motet.benchmarks.papers.step_balance import (
    Lengths,
    full_batch,
    memory_over_compute,
    most_tokens_per_s,
    step_balance,
)
from motet.benchmarks.rigs.published_bases import BASES, published_base
from motet.cluster.commands.cli import main
from motet.tests.rigs.oracle import VARIANTS
from motet.workers.costs.devices import DEVICES, Device
from motet.workers.costs.measured_steps import measured_device
from motet.workers.costs.operations import (
    Chunk,
    Formats,
    Operation,
    StepBatch,
    attention_flops,
    gang_weights_bytes,
    kv_bytes_of_a_token,
    model_size,
    step_operations,
)
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding

LLAMA, MIXTRAL = published_base("Llama-2-70B"), published_base("Mixtral-8x7B")
SLIDING = replace(published_base("Llama-3-8B"), sliding_windows=(300, None) * 16)
MODELS = (LLAMA, MIXTRAL, SLIDING)
LINEARS = ("KQV", "O", "UG", "D", "head")

chunks = st.builds(Chunk, st.integers(0, 500), st.integers(1, 500))
batches = st.builds(
    StepBatch,
    st.lists(st.integers(1, 2000), max_size=4).map(tuple),
    st.lists(chunks, max_size=3).map(tuple),
    st.integers(0, 5),
    st.sampled_from([1, 16]),
)


def by_name(model: ModelConfig, batch: StepBatch, degree: int = 1) -> dict[str, Operation]:
    return {operation.name: operation for operation in step_operations(model, batch, degree)}


def needs(operation: Operation | None) -> tuple[float, ...]:
    if operation is None:
        return (0.0,) * 4
    return operation.flops, operation.read_bytes, operation.activation_bytes, operation.network_bytes


@pytest.mark.parametrize("name", [name for name in nanoflow.PUBLISHED if name != "prefill attention"])
def test_nanoflow_s_table(name: str) -> None:
    """Prefill attention's 2.1 GB follow from no plain definition: its queries and results alone are 2.7 GB."""
    ours, theirs = nanoflow.table()[name]
    within = 0.01 if name == "decode attention" else 0.002
    assert ours.gflop == pytest.approx(theirs.gflop, rel=within)
    assert ours.gigabytes == pytest.approx(theirs.gigabytes, rel=within)
    assert ours.milliseconds == pytest.approx(theirs.milliseconds, rel=within)


def test_the_optimum_and_the_ratio_of_memory_to_compute() -> None:
    assert most_tokens_per_s(260e12, 70e9) == pytest.approx(1857, abs=0.5)
    assert most_tokens_per_s(280e12, 70e9) == pytest.approx(2000)
    gang = Device("8 A100", 8 * 312e12, 8 * 2e12, 640e9)
    assert memory_over_compute(gang, 70e9, 2048) == pytest.approx(0.348, abs=1e-3)


@given(chunks, st.one_of(st.none(), st.integers(1, 700)))
def test_a_chunk_sees_what_its_tokens_see(chunk: Chunk, window: int | None) -> None:
    stop = chunk.start + chunk.num_tokens
    first_seen = [max(0, token + 1 - (window or stop)) for token in range(chunk.start, stop)]
    seen = [token + 1 - first for token, first in zip(range(chunk.start, stop), first_seen, strict=True)]
    assert chunk.num_pairs(window) == sum(seen)
    assert chunk.num_seen(window) == stop - first_seen[0]


@given(st.sampled_from(MODELS), batches, st.integers(1, 1999), st.sampled_from([1, 2, 8]))
def test_more_work_never_needs_less(model: ModelConfig, batch: StepBatch, context: int, degree: int) -> None:
    before = by_name(model, batch, degree)
    longer = tuple(one + 1 for one in batch.contexts)
    for more in (
        replace(batch, contexts=(*batch.contexts, context)),
        replace(batch, chunks=(*batch.chunks, Chunk(0, context))),
        replace(batch, contexts=longer),
        replace(batch, num_adapters=batch.num_adapters + 1),
        replace(batch, rank=batch.rank + 1),
    ):
        after = by_name(model, more, degree)
        assert set(before) <= set(after)
        for name, operation in after.items():
            pairs = zip(needs(operation), needs(before.get(name)), strict=True)
            assert all(now >= then * (1 - 1e-12) for now, then in pairs), name


@given(st.sampled_from(MODELS), batches, batches)
def test_steps_add_up_but_for_the_weights_that_they_share(model: ModelConfig, one: StepBatch, two: StepBatch) -> None:
    """Of two batches in one step: operations and activations add up, and weights are read once."""
    one, two = replace(one, num_adapters=0), replace(two, num_adapters=0)
    both = by_name(model, StepBatch((*one.contexts, *two.contexts), (*one.chunks, *two.chunks)), 2)
    first, second = by_name(model, one, 2), by_name(model, two, 2)
    for name, operation in both.items():
        flops, read, between, network = needs(operation)
        apart = [sum(each) for each in zip(needs(first.get(name)), needs(second.get(name)), strict=True)]
        assert (flops, between, network) == pytest.approx((apart[0], *apart[2:])), name
        assert read <= apart[1] * (1 + 1e-12), name
        if name in LINEARS:
            assert read == max(needs(first.get(name))[1], needs(second.get(name))[1])
        elif "attention" in name:
            assert read == pytest.approx(apart[1])


@given(chunks, st.integers(1, 499), st.one_of(st.none(), st.integers(1, 700)))
def test_a_chunk_cut_in_two_computes_the_same_attention(chunk: Chunk, at: int, window: int | None) -> None:
    at %= chunk.num_tokens
    parts = [Chunk(chunk.start, at)] if at else []
    parts.append(Chunk(chunk.start + at, chunk.num_tokens - at))
    assert sum(part.num_pairs(window) for part in parts) == chunk.num_pairs(window)


@pytest.mark.parametrize("degree", [1, 2, 8, 16])
def test_the_workers_linears_sum_up_to_the_gangs(degree: int) -> None:
    """KV heads that several workers hold count as often."""
    batch = StepBatch((10,) * 3)
    operations = by_name(LLAMA, batch, degree)
    shares = [ModelSharding(LLAMA, degree, rank).linears for rank in range(degree)]
    for at, name in enumerate(("KQV", "O", "UG", "D")):
        weights = LLAMA.num_layers * sum(linears[at][0] * linears[at][1] for linears in shares)
        assert operations[name].flops == 2 * 3 * weights
        assert operations[name].read_bytes == 2 * weights


@pytest.mark.parametrize("degree", [1, 4, 8, 16, 64])
def test_a_gang_holds_what_its_workers_hold(degree: int) -> None:
    """Weights of layers, without norms, and KV."""
    parts = [ModelSharding(LLAMA, degree, rank) for rank in range(degree)]
    held = 2 * LLAMA.num_layers * sum(size[0] * size[1] for part in parts for size in part.linears)
    outside = 2 * (2 * LLAMA.vocab_size * LLAMA.hidden_size + model_size(LLAMA).norms)
    assert gang_weights_bytes(LLAMA, degree) == held + outside
    pages = sum(2 * LLAMA.num_layers * part.slab(16) for part in parts)
    assert kv_bytes_of_a_token(LLAMA, degree=degree) * 16 == pages


@pytest.mark.parametrize("degree", [2, 4])
def test_a_gang_sends_what_is_predicted(degree: int, tmp_path: Path) -> None:
    """Adapters add nothing to it."""
    model_path = tensor_parallel.write_model(tmp_path)
    model = ModelConfig.from_folder(model_path)
    found = by_name(model, StepBatch(chunks=(Chunk(0, tensor_parallel.NUM_ROWS),)), degree)
    predicted = found["communication"].network_bytes + found["embedding"].network_bytes
    for with_adapters in (False, True):
        assert tensor_parallel.count(model_path, degree, with_adapters)[1] * degree == predicted


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name].config()
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(expected).__name__]
    config.save_pretrained(tmp_path)
    size = model_size(ModelConfig.from_folder(tmp_path))
    parameters = {
        key: value for key, value in expected.named_parameters() if "correction_bias" not in key
    }  # no weights
    assert size.num_parameters == sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.parametrize("base", BASES)
def test_a_token_computes_two_operations_for_each_active_parameter(base: str) -> None:
    model = published_base(base)
    operations = by_name(model, StepBatch((100,)))
    attention = operations.pop("decode attention")
    assert sum(operation.flops for operation in operations.values()) == pytest.approx(
        model_size(model).flops_of_a_token, rel=1e-9
    )
    assert attention.flops == attention_flops(model, 100)
    assert attention.read_bytes == 100 * kv_bytes_of_a_token(model)


def test_each_worker_holds_a_latent_once(tmp_path: Path) -> None:
    """As DeepSeek V3 is published."""
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
    raw = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = ModelConfig.from_folder(tmp_path)
    assert model_size(model).num_parameters // 10**9 == 671
    assert model_size(model).flops_of_a_token == sum(
        operation.flops for name, operation in by_name(model, StepBatch((100,))).items() if name != "decode attention"
    )
    for degree in (1, 8):
        assert kv_bytes_of_a_token(model, degree=degree) == degree * 61 * 576 * 2
        assert ModelSharding(model, degree).slab(16) == 16 * 576


def test_a_large_batch_reads_every_expert_and_a_row_only_its_own() -> None:
    assert MIXTRAL.experts is not None
    expert = 32 * 3 * 4096 * 14336 * 2
    one, many = (by_name(MIXTRAL, StepBatch((1,) * number))["experts"].read_bytes for number in (1, 1000))
    router = 32 * 4096 * 8 * 2
    assert one == pytest.approx(2 * expert + router)
    assert many == pytest.approx(8 * expert + router)


def test_eight_bits() -> None:
    plain = {one.name: one for one in step_operations(LLAMA, StepBatch((1024,) * 8))}
    small = {one.name: one for one in step_operations(LLAMA, StepBatch((1024,) * 8), formats=Formats(2, True, True))}
    assert small["D"].read_bytes == plain["D"].read_bytes / 2 + 4 * 80 * 8192
    assert small["D"].times_s(DEVICES["H200"])[0] == plain["D"].times_s(DEVICES["H200"])[0] / 2
    assert small["decode attention"].read_bytes == plain["decode attention"].read_bytes * (128 + 4) / 256
    assert small["head"] == plain["head"]


def test_memory_is_full_and_no_more() -> None:
    device, lengths = DEVICES["A100 SXM 80GB"], Lengths(1155, 211)
    batch = full_batch(LLAMA, device, lengths, 8)
    context = 1155 + 106
    used = model_size(LLAMA).weights_bytes() + len(batch.contexts) * context * kv_bytes_of_a_token(LLAMA)
    assert 0 <= 640e9 - used < context * kv_bytes_of_a_token(LLAMA)
    assert batch.num_rows - len(batch.contexts) == len(batch.contexts) * 1155 // 211
    assert step_balance(LLAMA, batch, device, 8).limit == "compute"
    assert step_balance(LLAMA, StepBatch((1155,) * 8), device, 8).limit == "memory"
    with pytest.raises(ValueError, match="1 of A100 SXM 80GB cannot hold the weights"):
        full_batch(LLAMA, device, lengths)
    assert step_balance(LLAMA, StepBatch(), device).num_rows == 0


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="one worker at least"):
        step_operations(LLAMA, StepBatch((1,)), 0)
    with pytest.raises(ValueError, match="a chunk has one token"):
        Chunk(0, 0)
    with pytest.raises(ValueError, match="one token at least"):
        Lengths(0, 1)
    lonely = replace(DEVICES["H200"], network_bytes_per_s=None)
    with pytest.raises(ValueError, match="the network of H200 is not known"):
        step_balance(LLAMA, StepBatch((1,)), lonely, 2)
    assert step_balance(LLAMA, StepBatch((1,)), lonely).network_s == 0


def test_a_long_prompt_cut_in_other_ways_computes_the_same() -> None:
    """One worker gains nothing; keys and values that no other worker holds are exchanged with none."""
    device, one_head = DEVICES["H100 PCIe"], replace(LLAMA, num_kv_heads=1)
    alone = long_prompts.prefill(LLAMA, 4096, device, 1)
    assert alone.heads_s == alone.shared_s == alone.tokens_s
    apart = long_prompts.prefill(LLAMA, 4096, device, 8)
    assert apart.shared_s == apart.heads_s > apart.tokens_s > alone.heads_s / 8
    together = long_prompts.prefill(one_head, 4096, device, 8)
    assert together.shared_s != together.heads_s
    free = replace(device, network_bytes_per_s=1e18)
    assert (
        long_prompts.prefill(one_head, 4096, free, 8).shared_s < long_prompts.prefill(one_head, 4096, free, 8).heads_s
    )


def test_it_needs_no_torch() -> None:
    modules = ("devices", "operations")
    code = (
        "".join(f"import motet.workers.costs.{name}\n" for name in modules)
        + "import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False\n"


def test_this_machine_is_measured() -> None:
    device = measured_device(torch.device("cpu"))
    assert device.flops_per_s > 0 and device.bytes_per_s > 0 and device.memory_bytes > 0
    assert device.network_bytes_per_s is None


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASES["Llama-2-70B"]))
    requested = ["costs", str(tmp_path), "--device", "A100 SXM 80GB", "--degree", "8", "--decodes", "1024"]
    shown = CliRunner().invoke(main, [*requested, "--context", "1366", "--prompt-tokens", "1024"])
    assert shown.exit_code == 0 and "UG                     153931.6    96.637       0.000    61.671" in shown.output
    document = json.loads(CliRunner().invoke(main, [*requested, "--adapters", "4", "--json"]).output)
    assert document["parameters"] == 68_976_648_192
    assert document["seconds"] == pytest.approx(sum(one["seconds"] for one in document["operations"]))
    assert document["operations"][-2]["name"] == "LoRA"
    wider = json.loads(CliRunner().invoke(main, [*requested, "--degree", "16", "--json"]).output)
    assert wider["kv_bytes_of_a_token"] == 2 * document["kv_bytes_of_a_token"]
    assert wider["weights_bytes"] > document["weights_bytes"]
    for wrong, message in (
        (["--degree", "3"], "cannot share 64 attention heads"),
        (["--decodes", "0"], "give --decodes or --prompt-tokens"),
        (["--device", "Z80"], "'Z80' is not one of"),
    ):
        refused = CliRunner().invoke(main, ["costs", str(tmp_path), *wrong])
        assert refused.exit_code != 0 and message in refused.output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in CliRunner().invoke(main, ["costs", str(empty)]).output
