"""Sampling against its definition, and its independence of the batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from motet.kernels import joint_sampling
from motet.kernels.joint_sampling import ChoicesUnderWay, RowChoice
from motet.kernels.plain.sampling import PlainSampling, draw_alone
from motet.kernels.sampling import EXAMPLE_PARAMS, DrawParams, Penalty, ShapingParams
from motet.tests.rigs.native_builds import HERE, load_build
from motet.tests.rigs.sampling_definition import FILTERS, GRID, candidates, draw_with
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers.decoding.token_choice import sample as sample_with
from motet.workers.decoding.token_choice import uniform
from motet.workers.decoding.token_counts import BadWords, TokenCounts
from motet.workers.plan import SamplePlan, SeenTokens, packed
from motet.workers.wire.messages import SamplingParams, ThinkingBudget, TokenRules

VOCAB = 3000
# Gives a SampledToken for each row, None for one that is not finite.
Sample = Callable[[torch.Tensor, Sequence[SamplePlan]], list[Any]]


@pytest.fixture(scope="module", params=["torch", "native", "gpu"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """By each backend that there is for a CPU, and as on a GPU."""
    if request.param == "gpu":
        return sample_on_a_gpu
    kernels = PlainSampling() if request.param == "torch" else load_build((torch.float32, 1, HERE)).sampling

    def sample(logits: torch.Tensor, plans: Sequence[SamplePlan]) -> list[Any]:
        counts = [TokenCounts.of(plan) if plan.seen is not None else None for plan in plans]
        return sample_with(logits.clone(), plans, kernels, counts)

    return sample


def sample_on_a_gpu(logits: torch.Tensor, plans: Sequence[SamplePlan]) -> list[Any]:
    """The host waits for the device once, and once more if a row's filters keep many tokens."""
    counts = [TokenCounts.of(plan) if plan.seen is not None else None for plan in plans]
    with stand_in_gpu() as gpu:
        rows = logits.to(torch.device("cuda", 0))
        gpu.tally.clear()
        sampled = sample_with(rows, plans, PlainSampling(), counts)
        assert {wait.why for wait in gpu.tally.waits} == {"event.synchronize()"}
        assert len(gpu.tally.waits) in (1, 2)
        kinds = Counter(copy.kind for copy in gpu.tally.copies)
        assert kinds["to host"] == len(gpu.tally.waits) >= kinds["to device"], "one copy to the device and one back"
    return sampled


def plan(
    index: int = 0, seed: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any
) -> SamplePlan:
    requested = SamplingParams(**params)
    seen = SeenTokens(packed(prompt), packed(output)) if requested.has_penalty else None
    return SamplePlan(requested, seed, index, seen)


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draws(sample: Sample, row: torch.Tensor, num: int = 400, **params: Any) -> Counter[int]:
    plans = [plan(index=i, **params) for i in range(num)]
    return Counter(token.token_id for token in sample(row.expand(num, -1), plans))


def test_greedy_takes_the_most_likely(sample: Sample) -> None:
    rows = logits(4)
    tokens = sample(rows, [plan(temperature=0)] * 4)
    assert [t.token_id for t in tokens] == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(sample: Sample, temperature: float) -> None:
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    expected = (row / temperature).softmax(-1)[0]
    counts = draws(sample, row, 4000, temperature=temperature)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


@given(filters=st.fixed_dictionaries(FILTERS), seed=st.integers(0, 2**31))
def test_only_what_the_filters_leave_is_drawn(sample: Sample, filters: dict[str, Any], seed: int) -> None:
    row = logits(seed=seed % 7)
    allowed = candidates(row[0], DrawParams(**filters))
    assert set(draws(sample, row, 20, seed=seed, **filters)) <= allowed


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone_leaves_fewer_tokens(sample: Sample, name: str) -> None:
    row, params = torch.linspace(6, 0, 300).unsqueeze(0), {name: getattr(EXAMPLE_PARAMS, name)}
    allowed = candidates(row[0], DrawParams(**params))
    assert 0 < len(allowed) < 300
    assert set(draws(sample, row, 300, **params)) <= allowed


def test_the_table_is_complete() -> None:
    """Every parameter has values to try, and an example that changes something."""
    assert {"temperature", *FILTERS} == {*DrawParams.__struct_fields__}
    assert GRID.keys() == FILTERS.keys()
    for name in ShapingParams.__struct_fields__:
        assert name == "temperature" or getattr(EXAMPLE_PARAMS, name) != getattr(ShapingParams(), name)
    assert EXAMPLE_PARAMS.is_filtered
    for name in FILTERS:
        assert DrawParams(**{name: getattr(EXAMPLE_PARAMS, name)}).is_filtered


def test_a_wide_top_p_reaches_beyond_the_first_candidates(sample: Sample) -> None:
    flat = torch.zeros(1, VOCAB)
    assert max(draws(sample, flat, 300, top_p=0.99)) > 2000
    assert len(draws(sample, flat, 300, top_k=2000)) > 200


def test_a_draw_depends_on_seed_and_index_alone(sample: Sample) -> None:
    rows = logits(6)
    plans = [plan(index=i, seed=5, top_p=0.9) for i in range(6)]
    together = [t.token_id for t in sample(rows, plans)]
    alone = [sample(rows[i : i + 1], plans[i : i + 1])[0].token_id for i in range(6)]
    assert together == alone
    assert together != [t.token_id for t in sample(rows, [plan(index=i, seed=6, top_p=0.9) for i in range(6)])]


@pytest.mark.parametrize("vocab", [50, VOCAB])
def test_rows_drawn_together_are_those_drawn_alone(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all rows of a batch are drawn at once, whatever each asks for, some rows at a time in float64."""
    grid = product((0.3, 1.0, 2.0), *GRID.values())
    wanted = [
        draw_with(uniform(i * i, i), temperature=temperature, **dict(zip(GRID, filters, strict=True)))
        for i, (temperature, *filters) in enumerate(grid)
    ]
    rows = torch.randn(len(wanted), vocab, generator=torch.Generator().manual_seed(1)) * 2
    alone = [draw_alone(row, draw) for row, draw in zip(rows, wanted, strict=True)]
    for most_rows in (1, 7, 1000):
        monkeypatch.setattr(joint_sampling, "_MOST_BYTES", most_rows * vocab * 8)
        together = ChoicesUnderWay(rows.clone(), [RowChoice(draw, None, {}, None) for draw in wanted]).read()
        assert [chosen and chosen.token_id for chosen in together] == alone


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**20))
def test_uniform_is_in_range(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1


def test_uniform_is_even() -> None:
    values = torch.tensor([uniform(seed, index) for seed in range(50) for index in range(200)])
    assert torch.histc(values, 10, 0, 1).sub(1000).abs().max() < 130
    assert abs(float(torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1])) < 0.05


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-38, 5e-324])
def test_the_smallest_temperatures_are_greedy(sample: Sample, temperature: float) -> None:
    row = logits()
    for params in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        (token,) = sample(row, [plan(temperature=temperature, **params)])
        assert token is not None
        assert token.token_id == int(row.argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(sample: Sample, bad: float) -> None:
    rows = logits(3)
    rows[1, 7] = bad
    expected = rows.argmax(-1).tolist()
    for params in ({"temperature": 0}, {"top_p": 0.9, "temperature": 1e-9}, {"num_logprobs": 2, "temperature": 0}):
        tokens = sample(rows, [plan(**params)] * 3)
        assert [token and token.token_id for token in tokens] == [expected[0], None, expected[2]]


def test_the_largest_parameters_that_can_be_requested_draw_a_token(sample: Sample) -> None:
    row = logits()
    for params in ({"top_k": 10 * VOCAB}, {"temperature": 1e30}, {"top_p": 1e-30}, {"min_p": 1.0}, {"seed": -(2**63)}):
        (token,) = sample(row, [plan(**params)])
        assert token is not None
        assert 0 <= token.token_id < VOCAB
    many = {token: -100.0 for token in range(VOCAB) if token != 17}
    assert sample(row, [plan(logit_bias=many)])[0].token_id == 17


def test_penalties_and_bias_move_the_right_tokens(sample: Sample) -> None:
    row = torch.zeros(1, 5)
    row[0] = torch.tensor([2.0, 1.9, -1.0, 0.0, 0.0])
    greedy: dict[str, Any] = {"temperature": 0}
    assert sample(row, [plan(**greedy, repetition_penalty=2.0, prompt=(0,))])[0].token_id == 1
    assert sample(row, [plan(**greedy, repetition_penalty=2.0, output=(0, 1), prompt=(3,))])[0].token_id == 0
    assert sample(row, [plan(**greedy, presence_penalty=0.2, output=(0,))])[0].token_id == 1
    assert sample(row, [plan(**greedy, presence_penalty=0.2, prompt=(0,))])[0].token_id == 0
    assert sample(row, [plan(**greedy, frequency_penalty=0.06, output=(0, 0))])[0].token_id == 1
    assert sample(row, [plan(**greedy, frequency_penalty=0.06, output=(0,))])[0].token_id == 0
    assert sample(row, [plan(**greedy, logit_bias={4: 100.0})])[0].token_id == 4


@given(
    prompt=st.lists(st.integers(0, 49)),
    output=st.lists(st.integers(0, 49)),
    num_before=st.integers(0, 100),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    seed=st.integers(0, 2**20),
)
def test_penalties_follow_their_definition_token_by_token(
    prompt: list[int],
    output: list[int],
    num_before: int,
    repetition: float,
    presence: float,
    frequency: float,
    seed: int,
) -> None:
    """Tokens are counted from some point of the output on, as after a preemption, and then one by one."""
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(seed))
    counts = TokenCounts(SeenTokens(packed(prompt), packed(output[:num_before])))
    for token_id in output[num_before:]:
        counts.add(token_id)
    counts.check_integrity(prompt, output)
    expected = logits.clone()
    for token_id in {*prompt, *output}:
        value = float(logits[1, token_id])
        value = value / repetition if value > 0 else value * repetition
        times = output.count(token_id)
        expected[1, token_id] = value - (presence + frequency * times if times else 0)
    params = ShapingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    penalty = Penalty(params, counts.token_ids, counts.counts)
    for kernels in (PlainSampling(), load_build((torch.float32, 1, HERE)).sampling):
        wide = torch.zeros(3, 70)  # rows that do not lie side by side
        wide[:, :60] = logits
        kernels.penalise(wide[:, :60], [1], [penalty])
        torch.testing.assert_close(wide[:, :60], expected, atol=1e-6, rtol=1e-6)


def test_transformers_finds_the_same_repetitions() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    prompt, output = [3, 3, 7], [7, 9, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), row.clone())
    counts = TokenCounts(SeenTokens(packed(prompt), packed(output)))
    penalty = Penalty(ShapingParams(repetition_penalty=1.7), counts.token_ids, counts.counts)
    for kernels in (PlainSampling(), load_build((torch.float32, 1, HERE)).sampling):
        actual = row.clone()
        kernels.penalise(actual, [0], [penalty])
        assert torch.equal(actual, expected)


def test_logprobs_are_those_before_any_shaping(sample: Sample) -> None:
    row = logits()
    expected = row[0].log_softmax(-1)
    token = sample(row, [plan(temperature=0, logit_bias={7: 100.0}, num_logprobs=3)])[0]
    penalised = plan(temperature=0, logit_bias={7: 100.0}, num_logprobs=3, repetition_penalty=9.0, output=(1, 2, 7))
    assert sample(row, [penalised])[0].logprobs == token.logprobs
    assert token.token_id == 7
    assert token.logprobs is not None
    assert token.logprobs.chosen == pytest.approx(float(expected[7]))
    assert token.logprobs.top_ids == row[0].topk(3).indices.tolist()
    assert token.logprobs.top_logprobs == pytest.approx(expected.topk(3).values.tolist())
    assert sample(row, [plan(num_logprobs=None)])[0].logprobs is None
    chosen_only = sample(row, [plan(num_logprobs=0)])[0].logprobs
    assert chosen_only is not None
    assert chosen_only.top_ids == []


def test_penalties_cost_no_more_than_their_distinct_tokens() -> None:
    """Rows with 8,000 tokens cost a few times those without; going through all tokens in Python costs 25 times."""
    kernels, vocab, num_rows = load_build((torch.float32, 1, HERE)).sampling, 32000, 32
    rows = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1))
    requested = SamplingParams(repetition_penalty=1.2)
    counts = [TokenCounts(SeenTokens(packed(range(i, vocab, 4)), b"")) for i in range(num_rows)]
    plans = [SamplePlan(requested, 0, 0) for _ in range(num_rows)]

    def cost_s(of: Sequence[TokenCounts | None]) -> float:
        begun = time.process_time()
        for each in of:
            if each is not None:
                each.add(5)
        sample_with(rows, plans, kernels, of)
        return time.process_time() - begun

    without, penalised = (min(cost_s(of) for _ in range(8)) for of in ([], counts))
    assert penalised < 6 * without


TOKENS = st.integers(0, 11)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)


def is_allowed(token_id: int, rules: TokenRules, output: Sequence[int]) -> bool:
    """The definition of the rules."""
    completes_a_word = any([*output, token_id][-len(word) :] == [*word] for word in rules.bad_words)
    is_early = len(output) < rules.min_tokens and token_id in rules.late_token_ids
    return not (completes_a_word or is_early) and (not rules.allowed_token_ids or token_id in rules.allowed_token_ids)


@given(
    rules=st.builds(
        TokenRules,
        allowed_token_ids=st.sets(TOKENS, max_size=8).map(tuple),
        bad_words=WORDS,
        min_tokens=st.integers(0, 4),
        late_token_ids=st.sets(TOKENS, max_size=3).map(tuple),
    ),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1.0]),
    bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=2),
    penalty=st.sampled_from([0.0, 1.5]),
)
def test_only_what_rules_allow_is_chosen_as_if_there_were_nothing_else(
    sample: Sample, rules: TokenRules, seed: int, temperature: float, bias: dict[int, float], penalty: float
) -> None:
    """Beside a row without rules; log-probabilities are the model's own."""
    row = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    output: list[int] = []
    for index in range(5):
        left = [token for token in range(12) if is_allowed(token, rules, output)]
        if not left:
            return
        params: dict[str, Any] = {
            "temperature": temperature,
            "logit_bias": bias,
            "presence_penalty": penalty,
            "num_logprobs": 0,
        }
        wanted = plan(index, seed, output=(*output,), rules=rules, **params)
        plain = plan(index, seed, output=(*output,), **params)
        banned = row.clone()
        banned[[token for token in range(12) if token not in left]] = -torch.inf
        other = plan(temperature=0.0)
        chosen, beside = sample(torch.stack([row, row]), [wanted, other])
        assert beside.token_id == int(row.argmax())
        assert chosen.token_id == sample(torch.stack([banned]), [plain])[0].token_id
        assert chosen.token_id in left
        assert chosen.logprobs.chosen == pytest.approx(float(row.log_softmax(-1)[chosen.token_id]), abs=1e-5)
        output.append(chosen.token_id)


@pytest.mark.parametrize("masked", [None, True, False])
def test_the_end_of_thoughts_is_forced_whatever_else_is_said_but_within_a_character(masked: bool | None) -> None:
    """`masked`: whether a grammar's mask allows it; None: there is none."""
    rules = TokenRules(allowed_token_ids=(1, 2), bad_words=((5,),), thinking=ThinkingBudget(2, (4,), (5,), True))
    wanted = plan(2, output=(1, 2), rules=rules, temperature=0.0, logit_bias={1: 50.0, 5: -100.0}, num_logprobs=0)
    bits = sum(1 << token for token in ((1, 5) if masked else (1,)))
    masks = {} if masked is None else {0: bits.to_bytes(4, "little")}
    row, counts = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)), TokenCounts.of(wanted)
    expected = 1 if masked is False else 5
    (chosen,) = sample_with(row.clone(), [wanted], PlainSampling(), [counts], masks)
    assert chosen is not None and chosen.token_id == expected
    assert chosen.logprobs is not None
    assert chosen.logprobs.chosen == pytest.approx(float(row[0].log_softmax(-1)[expected]), abs=1e-5)
    with stand_in_gpu():
        (chosen,) = sample_with(row.to(torch.device("cuda", 0)), [wanted], PlainSampling(), [counts], masks)
    assert chosen is not None and chosen.token_id == expected


@given(words=WORDS.map(lambda words: [word for word in words if len(word) > 1]), output=st.lists(TOKENS, max_size=12))
def test_bad_words_are_found_however_the_output_came(words: list[tuple[int, ...]], output: list[int]) -> None:
    for num_given in range(len(output) + 1):
        found = BadWords(words, output[:num_given])
        for token_id in output[num_given:]:
            found.add(token_id)
        expected = [
            word[-1] for word in words if output[1 - len(word) :] == [*word[:-1]] and len(output) >= len(word) - 1
        ]
        assert sorted(found.banned()) == sorted(expected)
