"""What a step computes, as plain data: the leader's scheduler makes plans, workers execute them.

A plan says everything that its step needs but what a worker keeps of a sequence between steps: its KV pages and, where
a penalty needs them, the tokens that it has so far (`SeenTokens`). Plans travel to workers in processes of their own as
msgpack, without the page numbers that these know already (`execution/gang_executor.py`).

Long lists of numbers, which would cost more to encode than the step's other work, are int32 numbers side by side.

A step makes thousands of the structs that are `gc=False`, none of which can be part of a cycle: without them the
garbage collector has little to go through.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from .wire.messages import SamplingParams, TokenLogprobs
from .wire.prompt_scores import PromptScores


class Residence(msgspec.Struct, frozen=True, array_like=True):
    """An adapter in the pool."""

    digest: str
    module_ranks: dict[str, int]
    pages: tuple[int, ...]


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy an adapter into its pages while steps run. A later result reports its end."""

    residence: Residence


Tier = Literal["device", "host", "disk"]
Int32s = bytes  # int32 numbers in native byte order
INT32_BYTES = 4  # of each of them


def packed(numbers: Iterable[int]) -> Int32s:
    """The numbers as plans carry long lists of them."""
    return (numbers if isinstance(numbers, array) else array("i", numbers)).tobytes()


def unpacked(numbers: Int32s) -> array[int]:
    """What `packed` was given."""
    return array("i", numbers)


class PageMove(msgspec.Struct, frozen=True, array_like=True):
    """Copy pages of KV from one tier to another while steps run, in the order of the plans."""

    number: int
    source: Tier
    source_pages: tuple[int, ...]
    target: Tier
    target_pages: tuple[int, ...]


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy a page of the pool into another before the step's tokens are computed."""

    source: int
    target: int


class FullLayersCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy what layers that see all tokens have in some pages into one dense page; see `window_pages.FullLayers`.

    Before the step's tokens are computed, even if there are none.
    """

    sources: tuple[int, ...]
    target: int


class SeenTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All tokens of a sequence that come before the one that is chosen, for penalties."""

    prompt: Int32s  # empty unless a repetition penalty needs it
    output: Int32s


class SamplePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Choose one token after the sequence's last row."""

    params: SamplingParams
    seed: int  # the sequence's own, 64 bits
    index: int  # of the token among the sequence's generated ones; (seed, index) fixes the draw
    # With the first token that a run of the sequence chooses, if it has penalties. The worker keeps these tokens, and
    # adds those that later plans compute: the one that was chosen last.
    seen: SeenTokens | None = None
    is_constrained: bool = False  # the sequence has a grammar, whose mask the token needs (`decoding/mask_source.py`)


class ScorePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute the log-probabilities of tokens of the prompt, each from the row before it."""

    num_top: int  # likeliest tokens of each
    first_row: int  # among the sequence's rows of this step
    targets: Int32s  # the tokens, after `first_row` and the rows that follow it


class PoolPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Add up the last layer's states of tokens of the prompt."""

    first_row: int  # among the sequence's rows of this step
    num_rows: int


class StatePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a sequence's recurrent state is before a step, and where it goes. Pages are in the state's own order."""

    source: Int32s  # empty: the sequence begins, with a state of zeros
    target: Int32s  # the source's pages or others
    # The state after so many rows, ascending and less than all, is written there too, one after the other.
    snapshot_rows: tuple[int, ...] = ()
    snapshots: Int32s = b""


class SequencePlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute these tokens of a sequence, writing their KV, and choose the next one if `sample` is there."""

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int  # position of the first of them
    pages: Int32s  # all of the sequence's pages, enough for these tokens; of slabs, see `window_pages.FullLayers`
    adapter: str | None  # digest
    sample: SamplePlan | None  # None: a prompt chunk that is not the last, or that is only pooled
    is_fed: bool = False  # its one token is chosen by the step before; `token_ids` has a placeholder
    scores: ScorePlan | None = None  # None: none are requested, or those of these tokens have been computed before
    pool: PoolPlan | None = None  # None: none of these tokens is to be pooled
    state: StatePlan | None = None  # None: the base has no layers with a recurrent state


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step: int
    sequences: tuple[SequencePlan, ...]
    adapters: tuple[Residence, ...]  # that the sequences use
    loads: tuple[AdapterLoad, ...]
    moves: tuple[PageMove, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    outdated: tuple[str, ...] = ()  # digests without a name, which host memory need not keep
    penalised: tuple[int, ...] = ()  # ids of all running sequences with penalties; counts of others are dropped
    pins: dict[str, bool] = {}  # digests to pin (True) or unpin in host memory
    # Ids of sequences that ended or were preempted since the plan before was made. What workers keep of them is dropped
    # before this plan's sequences are computed.
    ended_runs: tuple[int, ...] = ()
    full_copies: tuple[FullLayersCopy, ...] = ()


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None


class AdapterFailure(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    message: str
    is_unavailable: bool = False  # the store could not be read; the adapter may be good


class MoveEnd(msgspec.Struct, frozen=True, array_like=True):
    number: int
    seconds: float  # that the copy took; in a gang, on its slowest worker
    problem: str | None  # why the copy failed


class HostAdapterStats(msgspec.Struct, frozen=True, array_like=True):
    """The packed adapters in host memory, and the reads of the store behind it, of the gang's first worker.

    Of reads that hang: of the worker that has most of them.
    """

    num_bytes: int = 0
    num_reads: int = 0  # since the start, of adapters that were not in host memory but in the store
    num_failed_reads: int = 0  # since the start, those included that were tried again
    num_hung_reads: int = 0  # that have been given up, and have not returned yet
    came: tuple[str, ...] = ()  # digests, since the last result
    went: tuple[str, ...] = ()
    pin_news: dict[str, str] = {}  # by digest, since the last result: why it cannot be kept; empty: recovered


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a plan. Loads and moves are those that ended since the last result, whichever plan began them."""

    step: int
    # By sequence id; None: its logits are not finite. A sequence whose mask was late has none, and computes its last
    # token again.
    tokens: dict[int, SampledToken | None]
    loaded: tuple[str, ...]  # digests
    failed: tuple[AdapterFailure, ...]
    moved: tuple[MoveEnd, ...] = ()
    host_adapter_stats: HostAdapterStats = HostAdapterStats()
    scores: dict[int, PromptScores | None] = {}  # by sequence id; None: they are not finite
    pooled: dict[int, bytes | None] = {}  # packed sums of states by sequence id; None: they are not finite
