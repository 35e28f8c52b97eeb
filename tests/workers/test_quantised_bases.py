"""Bases with quantised files, with adapters: against transformers and PEFT on the weights that the files stand for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Answer, Oracle, write_adapters, write_model
from motet.tests.rigs.quantised_base import FORMATS, write_quantised
from motet.workers.wire.messages import SamplingParams

NUM_TOKENS = 6
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[1].name, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
TOLERANCE = 4e-4  # of log-probabilities in float32, as of bases that are not quantised


def requested(rig: EngineRig) -> list[SequenceOutput]:
    generator = random.Random(11)
    for index, adapter in enumerate(ADAPTERS):
        rig.submit(index, generator.choices(range(VOCAB_SIZE), k=13), adapter, GREEDY)
    rig.finish()
    rig.assert_idle()
    return list(rig.outputs.values())


def difference(outputs: list[SequenceOutput], oracle: Oracle) -> float:
    """The largest of log-probabilities; the oracle continues with the engine's tokens, which it would choose, too."""
    generator, largest = random.Random(11), 0.0
    for output, adapter in zip(outputs, ADAPTERS, strict=True):
        prompt = generator.choices(range(VOCAB_SIZE), k=13)
        assert output.error is None
        logits = oracle.logits([*prompt, *output.token_ids[:-1]], adapter)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output.token_ids
        for row, token in zip(Answer(output.token_ids, logits).logprobs, output.logprobs, strict=True):
            expected = row[token.top_ids].tolist()
            largest = max(largest, *(abs(a - b) for a, b in zip(expected, token.top_logprobs, strict=True)))
    return largest


def made(variant: str, name: str, folder: Path, **changes: int) -> tuple[Stock, Oracle, Oracle]:
    """The quantised base, what it is to say, and what the base of which it was made says."""
    model = write_model(variant, folder / "model", **changes)
    adapters = write_adapters(model, folder / "adapters")
    quantised, expected = write_quantised(model, name, folder)
    stock = Stock.make(quantised, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")
    folders = {name: folder / "adapters" / name for name in stock.refs}
    return stock, Oracle(expected, folders), Oracle(model, folders)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("llama", name) for name in FORMATS if name not in ("w8a8", "mxfp4")),
        ("phi3", "gptq"),
        ("glm4", "int4"),
        ("qwen2_moe", "fp8"),
        ("qwen3_5", "int4"),
        ("deepseek_v3", "fp8"),  # as it is published
        ("deepseek_v2", "int4"),
        ("apertus", "int4"),
        ("nemotron_h_moe", "fp8"),
    ],
)
def test_a_quantised_base_is_the_one_that_its_files_stand_for(variant: str, name: str, tmp_path: Path) -> None:
    stock, oracle, original = made(variant, name, tmp_path)
    with stock.engine(200) as rig:
        outputs = requested(rig)
    assert difference(outputs, oracle) < TOLERANCE
    prompt = random.Random(11).choices(range(VOCAB_SIZE), k=13)
    assert (original.logits(prompt, None) - oracle.logits(prompt, None)).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize("degree", [1, 2])
def test_gpt_oss_as_it_is_published(degree: int, tmp_path: Path) -> None:
    """With experts of four bits; workers of a gang share the features of each."""
    stock, oracle, original = made("gpt_oss", "mxfp4", tmp_path, intermediate_size=64)
    if degree == 1:
        with stock.engine(200) as rig:
            outputs = requested(rig)
    else:
        with gang(stock.gang_config(200, 2)) as (engine, _):
            outputs = requested(EngineRig(engine, stock.refs))
    assert difference(outputs, oracle) < TOLERANCE
    prompt = random.Random(11).choices(range(VOCAB_SIZE), k=13)
    assert (original.logits(prompt, None) - oracle.logits(prompt, None)).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize(("variant", "name"), [("llama", "gptq"), ("llama", "fp8"), ("deepseek_v3", "fp8")])
def test_a_gang_of_two_reads_its_rows_and_columns(variant: str, name: str, tmp_path: Path) -> None:
    stock, oracle, _ = made(variant, name, tmp_path)
    with gang(stock.gang_config(200, 2)) as (engine, workers):
        outputs = requested(EngineRig(engine, stock.refs))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert difference(outputs, oracle) < TOLERANCE


def test_a_base_that_lacks_scales_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    quantised, _ = write_quantised(model, "fp8", tmp_path)
    raw = json.loads((quantised / "config.json").read_text())
    raw["quantization_config"] = FORMATS["int8"][1]
    (quantised / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"has no tensor 'model\.layers\.0\.mlp\.down_proj\.weight_scale': "):
        Stock.make(quantised, {}, tmp_path / "store").engine(60)
