"""Adapters that change the embedding and the head, against PEFT, in one batch with plain LoRA, DoRA and the base."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from motet.adapters.adapter import EMBEDDING, HEAD
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import VOCAB_SIZE, write_model
from motet.tests.rigs.peft_case import SAMPLING, TOLERANCE, PeftCase, logprobs_of
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.workers.decoding import prompt_scoring
from motet.workers.execution.executor import LocalExecutor
from motet.workers.wire.messages import SamplingParams
from motet.workers.wire.prompt_scores import PromptScores

pytestmark = pytest.mark.slow
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SOME_TOKENS = [0, 3, 17, 18, 90, VOCAB_SIZE - 1]
_ENDS = (EMBEDDING, HEAD)
# Bases whose head is the embedding and others; a scaled embedding, which layers take too; multipliers; capped logits.
BASES = ("llama", "llama_tied_llama3_rope", "gemma2", "granite", "gemma4", "cohere2")


def _configs(is_tied: bool) -> dict[str, LoraConfig]:
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6}
    configs = {
        "plain": LoraConfig(**common, target_modules=_LINEARS),
        "dora": LoraConfig(**common, use_dora=True, target_modules=_LINEARS[:4]),
        "both": LoraConfig(**common, target_modules=[*_LINEARS, EMBEDDING, HEAD], rank_pattern={HEAD: 7}),
        "embedding": LoraConfig(**common, target_modules=[EMBEDDING], use_rslora=True),
        "head": LoraConfig(**common, target_modules=["v_proj", HEAD]),
        "tokens": LoraConfig(**common, target_modules=_LINEARS, trainable_token_indices=_SOME_TOKENS),
        "tokens_and_head": LoraConfig(**common, target_modules=["v_proj", HEAD], trainable_token_indices=_SOME_TOKENS),
        "saved_embedding": LoraConfig(**common, target_modules=_LINEARS[:1], modules_to_save=[EMBEDDING]),
        "saved": LoraConfig(**common, target_modules=_LINEARS[:4], modules_to_save=[EMBEDDING, HEAD]),
        "lora_and_saved": LoraConfig(**common, target_modules=[EMBEDDING], modules_to_save=[HEAD]),
    }
    if not is_tied:
        two = {EMBEDDING: _SOME_TOKENS, HEAD: _SOME_TOKENS[2:]}
        configs["tokens_of_both"] = LoraConfig(**common, target_modules=_LINEARS, trainable_token_indices=two)
    return configs


def _draw(model: PeftModel, generator: torch.Generator) -> None:
    """Far from where training begins. Of saved modules the rows of every third token stay the base's."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * noise
        elif "lora_A" in name or "lora_embedding_A" in name:
            parameter.data = noise * parameter.shape[1] ** -0.5 * (4 if "embedding" in name else 1)
        elif "lora_B" in name or "lora_embedding_B" in name:
            parameter.data = 0.15 * noise
        elif "trainable_tokens_delta" in name:
            parameter.data += 0.5 * parameter.std() * noise
        elif "modules_to_save" in name and name.endswith("weight"):
            noise[::3] = 0
            parameter.data = parameter + 0.3 * parameter.std() * noise


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PeftCase:
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    models, folders = {}, {}
    for seed, (name, config) in enumerate(_configs(base.config.get_text_config().tie_word_embeddings).items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT says that the ends of a base are tied
            trained = get_peft_model(deepcopy(base), config).eval()
            _draw(trained, torch.Generator().manual_seed(seed))
            folders[name] = folder / name
            trained.save_pretrained(folders[name])
            models[name] = PeftModel.from_pretrained(deepcopy(base), folders[name]).eval()
    return PeftCase(
        base, models, folders, Stock.make(model_path, folders, folder / "store"), ("both", "tokens", "saved")
    )


def test_mixed_batch(case: PeftCase) -> None:
    """In chunks, and on a pool in which adapters evict one another; kernel by kernel, and in nano-batches."""
    for name in case.models:
        apart = (case.logprobs([3, 1, 4], name) - case.logprobs([3, 1, 4], None)).abs().max()
        assert apart > 100 * TOLERANCE, f"{name} makes no difference to compare"
    num_pages = 24 + max(case.stock.num_pages(30, name) for name in case.models)
    for settings in ({"num_pages": 900}, {"num_pages": num_pages, "max_tokens_per_step": 13}):
        with case.stock.engine(**settings) as rig:
            case.check(rig)
            assert (rig.engine.load().counters.num_adapter_evictions > 0) == (settings["num_pages"] == num_pages)
    with case.stock.engine(num_pages=900) as rig:
        assert isinstance(rig.engine.executor, LocalExecutor)
        runner = rig.engine.executor.runner
        runner._step = None
        case.check(rig)
        runner.nano_batches = {num_rows: 1 + num_rows // 3 for num_rows in range(2, 200)}
        case.check(rig)


def test_other_tokens_on_the_same_pages(tmp_path: Path) -> None:
    """Versions of the same ranks, which take turns in pages that have room for one."""
    model_path = write_model("llama", tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    models, folders = {}, {}
    for seed, tokens in enumerate((_SOME_TOKENS, [1, 3, 18, 19, 91, VOCAB_SIZE - 2], [2, 5, 17, 20, 91, 92])):
        name = f"version {seed}"
        folders[name] = tmp_path / name
        config = LoraConfig(r=4, target_modules=_LINEARS, trainable_token_indices=dict.fromkeys(_ENDS, tokens))
        models[name] = get_peft_model(deepcopy(base), config).eval()
        _draw(models[name], torch.Generator().manual_seed(seed))
        models[name].save_pretrained(folders[name])
    case = PeftCase(base, models, folders, Stock.make(model_path, folders, tmp_path / "store"), ())
    num_pages = case.stock.num_pages(16, "version 0")
    with case.stock.engine(num_pages=num_pages) as rig:
        for index in range(9):
            rig.submit(index, [1, 3, 17, 18, 91], f"version {index % 3}", SAMPLING)
        rig.finish()
        assert rig.engine.load().counters.num_adapter_evictions > 0
    for index, output in rig.outputs.items():
        expected = case.logprobs([1, 3, 17, 18, 91, *output.token_ids[:-1]], f"version {index % 3}")[4:]
        assert (logprobs_of(output) - expected).abs().max() <= TOLERANCE


def test_bfloat16(case: PeftCase, tmp_path: Path) -> None:
    """The first token's log-probabilities are as near those of PEFT in float32 as plain LoRA's, within a factor."""
    stock = Stock.make(case.stock.model_path, case.folders, tmp_path / "store", dtype="bfloat16")
    apart: dict[str, list[float]] = {name: [] for name in case.models}
    generator = random.Random(3)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(4)]
    with stock.engine(num_pages=1200) as rig:
        for index, (prompt, name) in enumerate((prompt, name) for prompt in prompts for name in case.models):
            rig.submit(index, prompt, name, SAMPLING)
        rig.finish()
        for index, (prompt, name) in enumerate((prompt, name) for prompt in prompts for name in case.models):
            difference = logprobs_of(rig.outputs[index])[0] - case.logprobs(prompt, name)[-1]
            apart[name].append(float(difference.abs().mean()))
    for name, differences in apart.items():
        assert median(differences) < 4 * median(apart["plain"]), (name, apart)


@pytest.mark.parametrize("degree", [2, 4])
def test_gang(case: PeftCase, degree: int) -> None:
    with gang(case.stock.gang_config(num_pages=1600, degree=degree)) as (engine, _):
        case.check(EngineRig(engine, case.stock.refs))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scores_of_prompts(case: PeftCase, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that hold several adapters, beside sequences that decode; some rows at a time."""
    monkeypatch.setattr(prompt_scoring, "MOST_BYTES", 4 * VOCAB_SIZE * 7)
    generator, names = random.Random(5), (None, *case.models)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(30)] for _ in names]
    with _engine(case, device, max_tokens_per_step=50) as rig:
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            rig.submit(index, prompt, name, SamplingParams(max_tokens=3, ignore_eos=True, num_prompt_logprobs=2))
        scores = dict.fromkeys(range(len(names)), b"")
        while rig.engine.has_work():
            for update in rig.step():
                assert update.error is None
                scores[update.sequence_id] += b"" if update.prompt_scores is None else update.prompt_scores.data
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        chosen = torch.tensor(PromptScores(2, scores[index]).rows()["logprob"].copy())
        expected = case.logprobs(prompt, name)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(chosen, expected, atol=TOLERANCE, rtol=0)


def test_on_a_gpu(case: PeftCase) -> None:
    """Tokens are fed there, and steps of other adapters are replayed beside those that are not recorded. None waits."""
    with gpu_of_twins() as gpu, case.stock.engine(1200, device="cuda", max_tokens_per_step=40) as rig:
        gpu.tally.clear()
        case.check(rig)
        lines = {wait.line.partition(":")[0] for wait in gpu.tally.waits_of("worker")}
    assert not lines & {"kernels/model_ends.py", "workers/execution/device_rows.py", "workers/execution/runner.py"}


@contextmanager
def _engine(case: PeftCase, device: str, **settings: Any) -> Iterator[EngineRig]:
    on_device = gpu_of_twins() if device == "cuda" else nullcontext()
    with on_device, case.stock.engine(1200, device=device, **settings) as rig:
        yield rig
