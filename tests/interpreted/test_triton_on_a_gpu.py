"""The engine as a GPU has it, with Triton's kernels and CUDA graphs, on a stand-in: the tokens of the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers.wire.messages import SamplingParams

ADAPTER = RECIPES[0].name
NUM_TOKENS = 3  # the interpreter is slow


def answers(rig: EngineRig) -> list[list[int]]:
    generator = random.Random(4)
    for sequence_id, adapter in enumerate((None, ADAPTER, ADAPTER)):
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.7 * (sequence_id == 1), seed=2, ignore_eos=True, num_logprobs=2
        )
        rig.submit(sequence_id, generator.choices(range(VOCAB_SIZE), k=10), adapter, sampling)
    rig.finish()
    rig.assert_idle()
    assert [told.error for told in rig.told.values()] == [None] * 3
    return [told.token_ids for told in rig.told.values()]


# Of what it throws away: lanes behind a mask hold what memory that nobody has written holds.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_decodes_are_replayed_and_give_the_cpus_tokens(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    adapter = write_adapters(model, tmp_path / "adapters")[ADAPTER]
    stock = Stock.make(model, {ADAPTER: adapter}, tmp_path / "store")
    with stock.engine(40) as rig:
        here = answers(rig)
    with stand_in_gpu() as gpu:
        small = {"max_num_sequences": 2, "max_model_len": 24, "max_tokens_per_step": 16}
        with stock.engine(40, device="cuda", **small) as rig:
            assert rig.engine.info.kernels.startswith("triton")
            gpu.tally.clear()
            assert answers(rig) == here
            num_steps = rig.engine.load().counters.num_steps
        assert len(gpu.tally.waits_of("worker")) <= num_steps, "the host waits for a step's tokens, and nothing else"
        assert gpu.tally.replays > 0
        assert gpu.tally.launches["chunk_kernel"] > 0, "prompts run outside of the graphs"
