"""The engine against transformers + PEFT: mixed batches, chunked prompts, preemption, eviction, random workloads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import pytest
import torch

from motet.kernels.native.build import COMPILERS
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.oracle import RECIPES, VARIANTS, VOCAB_SIZE, Answer, Oracle, write_adapters, write_model
from motet.workers.execution import runner
from motet.workers.execution.executor import LocalExecutor
from motet.workers.models.config import ModelConfig
from motet.workers.scheduling import prefix_reuse
from motet.workers.wire.messages import AdapterRef, Cancel, SamplingParams

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3  # of logits and log-probabilities in float32
BFLOAT16_TOLERANCE = 0.25  # of log-probabilities, mean over the vocabulary; transformers in bfloat16 is 0.12 off itself
KERNELS = "native" if any(shutil.which(name) for name in COMPILERS) else "torch"  # with a warning
NUM_TOKENS = 24
ADAPTERS: tuple[str | None, ...] = (None, *(recipe.name for recipe in RECIPES), None, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    adapter: str | None
    answer: Answer  # the oracle's, alone


@dataclass(frozen=True)
class Bench:
    """One model with all adapters, in motet and in the oracle, and the oracle's answers."""

    oracle: Oracle
    stock: Stock
    questions: tuple[Question, ...]
    crowd: tuple[Question, ...]  # short prompts to the base: all fit at once until their answers grow
    has_experts: bool
    has_states: bool  # layers have a recurrent state
    is_latent: bool


def _bench(variant: str, folder: Path) -> Bench:
    model_path = write_model(variant, folder / "model")
    adapters = write_adapters(model_path, folder / "adapters")
    oracle = Oracle(model_path, adapters)
    generator = random.Random(variant)
    questions = _questions(oracle, generator, ADAPTERS, longest=48)
    crowd = _questions(oracle, generator, (None,) * 12, longest=8)
    model, stock = ModelConfig.from_folder(model_path), Stock.make(model_path, adapters, folder / "store")
    has_experts, has_states = model.experts is not None, model.recurrent is not None
    return Bench(oracle, stock, questions, crowd, has_experts, has_states, model.latent is not None)


def _questions(
    oracle: Oracle, generator: random.Random, adapters: Sequence[str | None], longest: int
) -> tuple[Question, ...]:
    """Questions whose best tokens lead clearly, so that rounding cannot change the answer."""
    found: dict[int, Question] = {}
    for _ in range(20):
        missing = [index for index in range(len(adapters)) if index not in found]
        prompts = [_prompt(generator, low=1, high=longest) for _ in missing]
        own = [adapters[index] for index in missing]
        answers = oracle.answers(prompts, own, NUM_TOKENS)
        for index, prompt, adapter, answer in zip(missing, prompts, own, answers, strict=True):
            if answer.margin > 5 * TOLERANCE:
                found[index] = Question(prompt, adapter, answer)
        if len(found) == len(adapters):
            return tuple(found[index] for index in range(len(adapters)))
    raise AssertionError("every prompt has a close call: the logits are too flat")


def _prompt(generator: random.Random, low: int, high: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(low, high))]


@pytest.fixture(scope="module", params=VARIANTS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _bench(request.param, tmp_path_factory.mktemp(request.param))
    torch.set_num_threads(num_threads)


def _ask(rig: EngineRig, questions: Sequence[Question], sampling: SamplingParams = GREEDY) -> list[SequenceOutput]:
    """Asks all questions at once, and runs to the end."""
    for sequence_id, question in enumerate(questions):
        rig.submit(sequence_id, question.prompt, question.adapter, sampling)
    rig.finish()
    rig.assert_idle()
    return [rig.outputs[sequence_id] for sequence_id in range(len(questions))]


def _tiny_pool(bench: Bench) -> int:
    """The number of pages of the largest question, plus three."""
    return 3 + max(bench.stock.num_pages(len(q.prompt) + NUM_TOKENS, q.adapter) for q in bench.questions)


def _assert_same_tokens(questions: Sequence[Question], output: list[SequenceOutput]) -> None:
    for question, received in zip(questions, output, strict=True):
        assert received.token_ids == question.answer.token_ids, f"adapter {question.adapter}"
        assert (received.finish_reason, received.error) == ("length", None)


def _logprobs(output: SequenceOutput) -> torch.Tensor:
    """`[num_tokens, vocab]` in the order of token ids."""
    rows = torch.empty(len(output.logprobs), VOCAB_SIZE)
    for row, said in zip(rows, output.logprobs, strict=True):
        assert sorted(said.top_ids) == list(range(VOCAB_SIZE))
        row[said.top_ids] = torch.tensor(said.top_logprobs)
    return rows


def test_oracle_is_sharp(bench: Bench) -> None:
    """The comparison can fail: base and adapters give different logits, alone and in a batch."""
    prompt = bench.questions[0].prompt
    rows = torch.stack([bench.oracle.logits(prompt, adapter)[-1] for adapter in (None, *bench.stock.refs)])
    apart = (rows[:, None] - rows[None]).abs().amax(dim=-1) + torch.eye(len(rows)) * 10
    assert apart.min() > 0.3
    for question in bench.questions:
        alone = bench.oracle.logits(question.prompt + question.answer.token_ids[:-1], question.adapter)
        torch.testing.assert_close(alone[-NUM_TOKENS:], question.answer.logits, atol=TOLERANCE / 10, rtol=0)


def test_mixed_batch(bench: Bench) -> None:
    with bench.stock.engine(num_pages=400) as rig:
        rig.tap_logits()
        assert rig.engine.info.kernels.startswith(KERNELS)
        output = _ask(rig, bench.questions)
        _assert_same_tokens(bench.questions, output)
        for question, received in zip(bench.questions, output, strict=True):
            torch.testing.assert_close(torch.stack(received.logits), question.answer.logits, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(_logprobs(received), question.answer.logprobs, atol=TOLERANCE, rtol=0)
            chosen = torch.tensor([said.chosen for said in received.logprobs])
            torch.testing.assert_close(chosen, question.answer.logprobs.amax(dim=-1), atol=TOLERANCE, rtol=0)
        assert rig.engine.load().counters.num_preemptions == rig.engine.load().counters.num_adapter_evictions == 0


def test_a_step_at_once_and_kernel_by_kernel(bench: Bench) -> None:
    """Families compute a step as one native program, as the other tests do; kernel by kernel it is right, too.

    Latent attention is computed kernel by kernel alone.

    So are nano-batches, which a worker alone has no use for.
    """
    with bench.stock.engine(num_pages=400, max_tokens_per_step=64) as rig:
        executor = rig.engine.executor
        assert isinstance(executor, LocalExecutor)
        if KERNELS == "native" and not bench.is_latent:
            assert executor.runner._step is not None
            assert rig.engine.info.kernels.endswith("a step at once")
        executor.runner._step = None
        _assert_same_tokens(bench.questions, _ask(rig, bench.questions))
        executor.runner.nano_batches = {num_rows: 1 + num_rows // 3 for num_rows in range(2, 65)}
        _assert_same_tokens(bench.questions, _ask(rig, bench.questions))


@pytest.mark.each_kind
def test_chunked_prompts(bench: Bench) -> None:
    """Prompts in chunks that do not end with a page, beside decodes; two sequences share a prompt at the same time."""
    twice = [question for question in bench.questions for _ in range(2)]
    with bench.stock.engine(num_pages=400, max_tokens_per_step=13, max_num_sequences=6) as rig:
        _assert_same_tokens(twice, _ask(rig, twice))
        assert rig.engine.load().counters.num_cached_tokens > sum(len(q.prompt) for q in bench.questions) / 2


@pytest.mark.parametrize("max_tokens_per_step", [16, 512])
def test_tiny_pool(bench: Bench, max_tokens_per_step: int) -> None:
    """Adapters are evicted for one another, and sequences preempted, with and without chunked prompts."""
    questions = bench.questions + bench.crowd
    with bench.stock.engine(_tiny_pool(bench), max_tokens_per_step=max_tokens_per_step) as rig:
        fill_to_the_last_page(rig.engine._scheduler)
        output = _ask(rig, questions)
        _assert_same_tokens(questions, output)
        for question, received in zip(questions, output, strict=True):
            torch.testing.assert_close(_logprobs(received), question.answer.logprobs, atol=TOLERANCE, rtol=0)
        assert rig.engine.load().counters.num_preemptions > 0
        assert rig.engine.load().counters.num_adapter_evictions > 0


@pytest.mark.parametrize("has_room", [True, False])
def test_kept_prefixes(bench: Bench, has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent again, and continued from the middle of an answer: the same, though most of it is not computed.

    Without room in the pool pages come back from host memory, and from disk once that is full too. Of answers states
    are kept with each page, where a step keeps so many.
    """
    monkeypatch.setattr(prefix_reuse, "_ANSWER_PAGES", 1)
    monkeypatch.setattr(runner, "_MOST_COPIED", 3)
    num_before = NUM_TOKENS // 2
    later = tuple(
        Question(q.prompt + q.answer.token_ids[:num_before], q.adapter, _rest(q.answer, num_before))
        for q in bench.questions
    )
    sampling = msgspec.structs.replace(GREEDY, max_tokens=NUM_TOKENS - num_before)
    num_state_pages, page_bytes = bench.stock.num_state_pages, bench.stock.page_bytes
    num_pages = 800 if has_room else _tiny_pool(bench) + num_state_pages  # a kept state, and that of the sequence
    num_host_pages = 12 + 2 * num_state_pages
    settings = {
        "kv_host_bytes": num_host_pages * page_bytes,
        "kv_disk_bytes": 400 * page_bytes,
        "kv_disk_path": tmp_path,
    }
    with bench.stock.engine(num_pages, max_tokens_per_step=64, **settings) as rig:
        rig.prefer_copies()
        for _ in range(2):
            _assert_same_tokens(bench.questions, _ask(rig, bench.questions))
        num_cached = rig.engine.load().counters.num_cached_tokens
        shorter = msgspec.structs.replace(GREEDY, max_tokens=num_before + 1)
        for question, received in zip(bench.questions, _ask(rig, bench.questions, shorter), strict=True):
            assert received.token_ids == question.answer.token_ids[: num_before + 1]
        output = _ask(rig, later, sampling)
        _assert_same_tokens(later, output)
        for question, received in zip(later, output, strict=True):
            torch.testing.assert_close(_logprobs(received), question.answer.logprobs, atol=TOLERANCE, rtol=0)
        if has_room:
            sharable = [_sharable(len(q.prompt) - 1) for q in (*bench.questions, *bench.questions, *later)]
            if bench.has_states:  # they are kept after the last full page that a prompt need not compute
                sharable = [(len(q.prompt) - 1) // 8 * 8 for q in bench.questions]
                assert num_cached == sum(sharable) < rig.engine.load().counters.num_cached_tokens / 3
            else:
                assert rig.engine.load().counters.num_cached_tokens == sum(sharable) > num_cached > 0
        else:
            load = rig.engine.load()
            assert min(load.counters.num_pages_in, load.gauges.num_disk_pages) > 0
            assert load.counters.num_move_failures == 0


def _sharable(num_tokens: int) -> int:
    """Of so many that are there: full pages of 8, and 2 or more of the next one, which is copied."""
    return num_tokens - (num_tokens % 8 == 1)


def _rest(answer: Answer, num_tokens: int) -> Answer:
    """The answer without its first `num_tokens` tokens."""
    return Answer(answer.token_ids[num_tokens:], answer.logits[num_tokens:])


@pytest.mark.each_kind
def test_random_workload(bench: Bench) -> None:
    """Arrivals and cancels at random times on a tiny pool: whatever ends is right, and nothing is left behind."""
    generator = random.Random(str(bench.questions[0].prompt))  # each model has a workload of its own
    pool = max(bench.stock.num_pages(64, adapter) for adapter in ADAPTERS) + 3
    missing = AdapterRef("0" * 64, {"q_proj": 4})
    with bench.stock.engine(pool, max_tokens_per_step=20, max_num_sequences=5) as rig:
        requested: dict[int, tuple[list[int], str | None]] = {}
        cancelled: dict[int, int] = {}  # tokens received until then
        lost: set[int] = set()
        for sequence_id in range(60):
            adapter = generator.choice([*ADAPTERS, "missing"])
            prompt = _prompt(generator, low=1, high=40)
            sampling = SamplingParams(max_tokens=generator.randint(1, 24), temperature=0.0, ignore_eos=True)
            requested[sequence_id] = (prompt, adapter)
            rig.submit(sequence_id, prompt, missing if adapter == "missing" else adapter, sampling)
            if adapter == "missing":
                lost.add(sequence_id)
            if generator.random() < 0.3:
                victim = generator.choice(list(requested))  # running, waiting, ended or cancelled before
                rig.engine.receive(Cancel(victim))
                rig.engine.check_integrity()
                if not rig.outputs[victim].ended:
                    cancelled.setdefault(victim, len(rig.outputs[victim].token_ids))
            for _ in range(generator.choice([0, 0, 1, 2, 8])):
                rig.step()
        rig.finish()
        rig.assert_idle()
        for sequence_id, (prompt, adapter) in requested.items():
            received = rig.outputs[sequence_id]
            if sequence_id in cancelled:
                assert len(received.token_ids) == cancelled[sequence_id], "tokens came after the cancel"
                assert received.finish_reason is None
                assert received.error is not None and received.error.kind == "cancelled", "its usage was not reported"
            elif sequence_id in lost:
                assert received.error is not None
                assert received.error.kind == "adapter_failed"
            else:
                assert (received.finish_reason, received.error) == ("length", None)
            if received.token_ids:
                logits = bench.oracle.logits(prompt + received.token_ids[:-1], adapter)[len(prompt) - 1 :]
                chosen = logits.gather(1, torch.tensor(received.token_ids)[:, None])[:, 0]
                assert (logits.amax(dim=-1) - chosen).max() < TOLERANCE
        assert len(cancelled) > 2
        assert rig.engine.load().counters.num_adapter_evictions > 0


@pytest.mark.each_kind
def test_seeded_draws_survive_preemption(bench: Bench) -> None:
    """A sequence with a seed gets the same text on a tiny pool as on one that holds all."""
    questions = bench.questions + bench.crowd
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    with bench.stock.engine(num_pages=400) as rig:
        texts = [received.token_ids for received in _ask(rig, questions, sampling)]
    assert any(text != question.answer.token_ids for text, question in zip(texts, questions, strict=True))
    with bench.stock.engine(_tiny_pool(bench), max_tokens_per_step=64) as rig:
        fill_to_the_last_page(rig.engine._scheduler)
        assert [received.token_ids for received in _ask(rig, questions, sampling)] == texts
        assert rig.engine.load().counters.num_preemptions > 0


def test_bfloat16(bench: Bench, tmp_path: Path) -> None:
    """The log-probabilities of the first token are near those of the oracle, which computes in float32."""
    folders = {name: bench.stock.model_path.parent / "adapters" / name for name in bench.stock.refs}
    stock = Stock.make(bench.stock.model_path, folders, tmp_path / "store", dtype="bfloat16")
    with stock.engine(num_pages=400) as rig:
        output = _ask(rig, bench.questions)
        apart = [
            float((_logprobs(received)[0] - question.answer.logprobs[0]).abs().mean())
            for question, received in zip(bench.questions, output, strict=True)
        ]
        # Rounding may choose another expert for a row, and then the answer is another one.
        worst = median(apart) if bench.has_experts else max(apart)
        assert worst < BFLOAT16_TOLERANCE, apart
        assert all(len(received.token_ids) == NUM_TOKENS for received in output)


def test_kinds_are_variants(pytestconfig: pytest.Config) -> None:
    """Those of tests with the mark `each_kind`, by their names."""
    plugin = next(each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "KINDS"))
    assert set(plugin.KINDS) <= VARIANTS.keys()
