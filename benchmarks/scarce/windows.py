"""KV that a sequence takes where layers see a window of the newest tokens, and how many sequences fit a pool.

Virtual time: the real scheduler, and a stand-in for the worker. One sequence has a prompt of 8k or 32k tokens and an
answer of 2,048; its pages are counted while its prompt is computed (the most) and at its end. Then a pool that holds
two such sequences whole gets 16 of them: how many run at once. Page sizes are those of the shapes in bfloat16.

It runs against any checkout: `motet` is what is imported by that name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import SamplingParams, SequenceRequest

BLOCK_SIZE, MAX_TOKENS_PER_STEP, ANSWER, NUM_SEQUENCES = 16, 512, 2048, 16
_MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Of a base: layers that see all tokens and layers that see a window, and the size of their KV."""

    num_full: int
    num_sliding: int
    window: int
    num_kv_heads: int
    head_dim: int

    @property
    def page_bytes(self) -> int:
        return (self.num_full + self.num_sliding) * BLOCK_SIZE * 2 * self.num_kv_heads * self.head_dim * 2

    def limits(self, num_pages: int, num_sequences: int) -> GangLimits:
        sizes = (1 << 17, 1 << 16, BLOCK_SIZE, num_pages, MAX_TOKENS_PER_STEP, num_sequences)
        known = {field.name for field in fields(GangLimits)}
        if self.num_full and "full_layers" in known:
            from motet.workers.window_pages import FullLayers

            full_layers = FullLayers(self.num_full, self.num_full + self.num_sliding)
            return GangLimits(*sizes, window=self.window, full_layers=full_layers)
        if self.num_full or "window" not in known:
            return GangLimits(*sizes)
        return GangLimits(*sizes, window=self.window)


SHAPES = {
    "Mistral 7B 0.1": Shape(0, 32, 4096, 8, 128),
    "Gemma 2 9B": Shape(21, 21, 4096, 8, 256),
    "Gemma 3 12B": Shape(8, 40, 1024, 8, 256),
    "Gemma 4 31B": Shape(10, 100, 1024, 4, 512),  # 50 layers with a window, whose KV is twice as large
}


@dataclass(frozen=True)
class Kept:
    prompt_mib: float  # the most while the prompt is computed
    answer_mib: float  # at the end of the answer
    whole_mib: float  # all of its tokens in all layers
    num_at_once: int  # sequences that run at once where two fit whole


def kept(shape: Shape, num_tokens: int) -> Kept:
    """The KV of a sequence whose prompt has so many tokens."""
    num_whole = -(-(num_tokens + ANSWER) // BLOCK_SIZE)
    most, last = 0, 0
    scheduler = Scheduler(shape.limits(num_whole + 8, 1), frozenset(), lambda _: 0)
    _add(scheduler, 0, num_tokens)
    while scheduler.has_work():
        scheduler.commit(plan := scheduler.schedule(), _result(plan))
        held = [sequence.page_use.num_pages for sequence in scheduler._running.by_id.values()]
        most, last = max([most, *held]), held[0] if held else last
    num_at_once = 0
    scheduler = Scheduler(shape.limits(2 * num_whole, NUM_SEQUENCES), frozenset(), lambda _: 0)
    for number in range(NUM_SEQUENCES):
        _add(scheduler, number, num_tokens)
    while scheduler.load().gauges.num_waiting:
        scheduler.commit(plan := scheduler.schedule(), _result(plan))
        num_at_once = max(num_at_once, scheduler.load().gauges.num_running)
    page_mib = shape.page_bytes / _MIB
    return Kept(most * page_mib, last * page_mib, num_whole * page_mib, num_at_once)


def _add(scheduler: Scheduler, number: int, num_tokens: int) -> None:
    request = SequenceRequest(
        sequence_id=number,
        prompt_token_ids=[3 + number, *[1] * (num_tokens - 1)],
        sampling=SamplingParams(max_tokens=ANSWER),
        tenant="t",
    )
    assert scheduler.add(request, 0) is None


def _result(plan: StepPlan) -> StepResult:
    word = SampledToken(1, None)
    return StepResult(plan.step, {part.sequence_id: word for part in plan.sequences if part.sample is not None}, (), ())


def measure() -> dict[str, float]:
    """For `scarcity.py`: a sequence of 32k tokens of Mistral 7B 0.1."""
    found = kept(SHAPES["Mistral 7B 0.1"], 1 << 15)
    return {"window_32k_mib": found.answer_mib, "window_32k_at_once": float(found.num_at_once)}


def main() -> None:
    found = {
        f"{name}, {num_tokens >> 10}k": kept(shape, num_tokens)
        for name, shape in SHAPES.items()
        for num_tokens in (1 << 13, 1 << 15)
        if name != "Gemma 2 9B" or num_tokens == 1 << 13  # its context
    }
    print(f"{'':24} {'prompt':>10} {'answer':>10} {'whole':>10} {'at once':>10}")
    for name, one in found.items():
        sizes = "".join(f"{size:6.0f} MiB" for size in (one.prompt_mib, one.answer_mib, one.whole_mib))
        print(f"{name:24} {sizes} {one.num_at_once:10}")
    print(json.dumps({name: asdict(one) for name, one in found.items()}))


if __name__ == "__main__":
    main()
