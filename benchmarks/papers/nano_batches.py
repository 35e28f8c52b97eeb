"""NanoFlow's nano-batches (arXiv 2408.12757) on a gang of two workers with a slow network: what they hide and cost.

Two processes of one core and thread each share a base of Qwen2.5-0.5B's sizes (a vocabulary of 4,096, random weights,
bfloat16). They add up partial sums with gloo over a loopback of their own, which `tc tbf` slows to a rate, for both
directions together. Half of a step's rows decode, the others are a prompt. Each step is computed whole, split with each
sum waited for, and split with sums under way, in turn; medians count. Needs root, `tc`, `ip` and `unshare`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from motet.cluster.config import MotetConfig
from motet.workers import worker_builder
from motet.workers.costs.step_costs import LEAST_ROWS, StepTimes, first_rows, first_rows_of
from motet.workers.engine_builder import rendezvous
from motet.workers.parallel import EndedSum, PendingSum, ProcessGroup
from motet.workers.plan import SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.step_measurements import measured_steps
from motet.workers.wire.messages import SamplingParams

HOST, DEGREE = "127.0.0.1", 2
HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 896, 4864, 24, 14, 2, 64, 4096
RATES = (None, 2000, 1000, 300)  # Mbit/s; None: as fast as the loopback is
NUM_ROWS = (64, 256, 512)
ROUNDS_S, LEAST_ROUNDS, MOST_ROUNDS = 9.0, 3, 40  # of a case
BLOCK_SIZE, CONTEXT, MAX_LENGTH = 16, 64, 1024  # tokens of a page; that a sequence which decodes has; at most
# A burst of two packets is sent at any speed, which has to be little beside a sum.
FREE_PACKET_BYTES, PACKET_BYTES, BURST_BYTES = 64 << 10, 8 << 10, 20 << 10


class Group(ProcessGroup):
    """Waits for a sum where it is begun, if `overlaps` is False: nano-batches without what they are for."""

    overlaps = True

    def begin_all_reduce(self, x: torch.Tensor) -> PendingSum:
        begun = super().begin_all_reduce(x)
        return begun if self.overlaps else EndedSum(begun.wait())


@dataclass(frozen=True)
class Case:
    """Times over those of the whole step, inverted: above 1 is faster."""

    rate: int | None
    num_rows: int
    whole_s: float
    split_gain: float  # each sum waited for
    overlapped_gain: float
    chosen_gain: float  # as the model chooses
    predicted_gain: float
    is_chosen: bool


def write_model(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    query, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    linears = {
        "self_attn.q_proj": (query, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, query),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    for layer in range(NUM_LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linears.items()}
    drawn = {
        name: torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).bfloat16()
        for name, shape in tensors.items()
    }
    norms = [f"layers.{layer}.{name}_layernorm" for layer in range(NUM_LAYERS) for name in ("input", "post_attention")]
    drawn |= {f"model.{name}.weight": torch.ones(HIDDEN).bfloat16() for name in (*norms, "norm")}
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def step_of(num_rows: int) -> StepPlan:
    """Half of the rows decode, and the others are one prompt. Each sequence has pages of its own."""
    sample = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
    pages = -(-CONTEXT // BLOCK_SIZE)
    decodes = [
        SequencePlan(row, (row,), CONTEXT - 1, packed(range(row * pages, (row + 1) * pages)), None, sample)
        for row in range(num_rows // 2)
    ]
    num_tokens, first = num_rows - len(decodes), len(decodes) * pages
    own = packed(range(first, first - (-num_tokens // BLOCK_SIZE)))
    return StepPlan(1, (*decodes, SequencePlan(num_rows, tuple(range(num_tokens)), 0, own, None, sample)), (), ())


def shape(rate: int | None) -> None:
    """Slows this process's loopback to so many Mbit/s."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True, check=False)
    packet_bytes = FREE_PACKET_BYTES if rate is None else PACKET_BYTES
    subprocess.run(["ip", "link", "set", "lo", "up", "mtu", str(packet_bytes)], check=True)
    if rate is not None:
        limits = ["rate", f"{rate}mbit", "burst", str(BURST_BYTES), "latency", "500ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)


class Worker:
    """One of the gang, which measures steps together with the other."""

    def __init__(self, rank: int, port: int, model_path: Path) -> None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        store = TCPStore(HOST, port, is_master=False)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._group = Group(rank, DEGREE, store, 300.0, torch.device("cpu"))
        config = MotetConfig.of(
            model_path=model_path,
            data_dir=model_path,
            pool_bytes=512 << 20,
            tensor_parallel=DEGREE,
            num_threads=1,
            block_size=BLOCK_SIZE,
            max_tokens_per_step=max(NUM_ROWS),
        ).engine
        self._runner = worker_builder.build_executor(config, self._group, None).runner

    def measured(self) -> StepTimes:
        """As at a gang's start, with the network as it is now."""
        self._group.overlaps = True
        return measured_steps(self._group, self._runner, MAX_LENGTH, LEAST_ROWS, max(NUM_ROWS))

    def case(self, rate: int | None, num_rows: int, measured: StepTimes) -> Case:
        plan, chosen = step_of(num_rows), first_rows_of(measured, LEAST_ROWS, max(NUM_ROWS))
        forced = {num_rows: first_rows(num_rows)}
        ways: dict[str, tuple[Mapping[int, int], bool]] = {
            "whole": ({}, True),
            "split": (forced, False),
            "overlapped": (forced, True),
        }
        if num_rows not in chosen:
            ways["chosen"] = (chosen, True)
        times: dict[str, list[float]] = {name: [] for name in ways}
        logits = {name: self._run(plan, *way)[1] for name, way in ways.items()}
        for name, found in logits.items():
            assert torch.equal(found, logits["whole"]), f"{name}: other logits than the whole step's"
        began_at, is_over = time.perf_counter(), False
        while not is_over:
            for name, way in ways.items():
                times[name].append(self._run(plan, *way)[0])
            num_rounds, late = len(times["whole"]), time.perf_counter() - began_at > ROUNDS_S
            if (
                num_rounds == LEAST_ROUNDS and num_rows not in chosen
            ):  # what is left shows how far the same step differs
                ways = {name: ways[name] for name in ("chosen", "whole")}
            mine = num_rounds >= (LEAST_ROUNDS if late else MOST_ROUNDS)
            is_over = bool(self._group.all_gather(torch.tensor([mine])).any())
        whole_s = median(times["whole"])
        gain = {name: whole_s / median(found) for name, found in times.items()}
        return Case(
            rate,
            num_rows,
            whole_s,
            gain["split"],
            gain["overlapped"],
            gain.get("chosen", gain["overlapped"]),
            measured.gain(num_rows),
            num_rows in chosen,
        )

    def _run(self, plan: StepPlan, nano_batches: Mapping[int, int], overlaps: bool) -> tuple[float, torch.Tensor]:
        self._runner.nano_batches, self._group.overlaps = nano_batches, overlaps
        self._group.all_gather(torch.zeros(1))  # both begin together
        began_at = time.perf_counter()
        logits = self._runner.logits(plan)
        return time.perf_counter() - began_at, logits


def work(rank: int, port: int, model_path: Path) -> None:
    worker = Worker(rank, port, model_path)
    cases: list[Case] = []
    say = print if rank == 0 else (lambda *_: None)
    say("Mbit/s rows | whole, ms | split alone | sums under way | as chosen | predicted")
    for rate in RATES:
        if rank == 0:
            shape(rate)
        worker._group.all_gather(torch.zeros(1))
        measured = worker.measured()
        for num_rows in NUM_ROWS:
            cases.append(case := worker.case(rate, num_rows, measured))
            say(
                f"{rate or 'free':>6} {num_rows:4} | {case.whole_s * 1e3:9.1f} | {case.split_gain:11.3f} "
                f"| {case.overlapped_gain:14.3f} | {case.chosen_gain:9.3f} "
                f"| {case.predicted_gain:.3f}{', chosen' if case.is_chosen else ''}"
            )
        taken = (f"{rows} {measured.whole[rows] * 1e3:.0f} {measured.split[rows] * 1e3:.0f}" for rows in measured.whole)
        say(f"  measured as at a start: rows, ms whole and in nano-batches: {'; '.join(taken)}")
    predicted = [case.chosen_gain for case in cases if case.is_chosen and case.num_rows >= 256]
    elsewhere = [case.chosen_gain for case in cases if not (case.is_chosen and case.num_rows >= 256)]
    summary = {
        "predicted_gain_256": round(min(predicted), 3) if predicted else None,
        "best_gain_256": round(max(predicted), 3) if predicted else None,
        "elsewhere_min": round(min(elsewhere), 3),
        "num_predicted": len(predicted),
    }
    say(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    if not parser.parse_args().inside:
        if missing := [name for name in ("tc", "ip", "unshare") if shutil.which(name) is None]:
            parser.error(f"{', '.join(missing)} cannot be found: a slow network is made with tc, ip and unshare")
        if os.geteuid() != 0:
            parser.error("a network of its own needs root")
        again = [sys.executable, "-m", "motet.benchmarks.papers.nano_batches", "--inside"]
        sys.exit(subprocess.run(["unshare", "--net", *again], check=False).returncode)
    shape(None)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        model_path, store = write_model(Path(name)), rendezvous(HOST)
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=work, args=(rank, store.port, model_path)) for rank in range(DEGREE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
