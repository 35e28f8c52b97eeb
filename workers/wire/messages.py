"""Messages between routers and gang leaders: all that a router knows of a worker.

They travel as msgpack over one bidirectional gRPC stream per router and leader. A leader sends one `Frame` per engine
step; it holds the tokens of every sequence that this router submitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec
from llguidance import LLParserLimits

from ...kernels.sampling import NO_PENALTIES, ShapingParams, penalty_numbers
from .beams import BeamRound, BeamRules, BeamsSoFar
from .engine_load import EngineLoad, ServedElsewhere, TenantShare
from .prompt_scores import Pooling, PromptScores

# Which tokens a sequence may have, whatever the model says.

Word = tuple[int, ...]


class ThinkingBudget(msgspec.Struct, frozen=True):
    """After this number of thinking tokens, those of the end are forced, whatever other rules say."""

    num_tokens: int  # of all thoughts together, without the marks around them
    begin: Word
    end: Word
    has_begun: bool = False  # the prompt ends in the midst of a thought


class TokenRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By token ids alone. Some token is always left, unless there is a grammar: the router has made sure of that."""

    allowed_token_ids: tuple[int, ...] = ()  # no others; empty: all
    bad_words: tuple[Word, ...] = ()  # the last token of one may not follow those before it, all of them generated
    min_tokens: int = 0  # generated before the first of `late_token_ids`
    late_token_ids: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None

    @property
    def looks_back(self) -> bool:
        """What may come depends on the tokens before it."""
        return self.thinking is not None or any(len(word) > 1 for word in self.bad_words)


# What a sequence has cost: tokens that gangs computed for it, and pages that it held.


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cumulative, over all runs of a sequence and all gangs that computed it.

    Each position of the prompt is counted once, as computed or as cached, and each generated token once.
    """

    kv_page_s: float = 0.0  # pages of KV times seconds; a page that several sequences hold counts for each
    adapter_page_s: float = 0.0  # its share: an adapter's pages are divided among the sequences that run with it
    num_kv_pages: int = 0  # that it holds now; 0: it does not run
    num_adapter_pages: float = 0.0  # its share of its adapter's pages now
    num_computed_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # found in the prefix cache instead
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed again after a preemption, a move or a lost gang, or in vain
    attempt: int = 0  # `SequenceRequest.attempt` of the request that began the sequence

    @property
    def num_computed_tokens(self) -> int:
        """All that gangs have computed: charged tokens, and those that were computed again."""
        return self.num_computed_prompt_tokens + self.num_generated_tokens + self.num_recomputed_tokens

    def after(self, seconds: float) -> SequenceUsage:
        """The usage `seconds` later, if the sequence has held the same pages all the time."""
        if not seconds:
            return self
        return msgspec.structs.replace(
            self,
            kv_page_s=self.kv_page_s + self.num_kv_pages * seconds,
            adapter_page_s=self.adapter_page_s + self.num_adapter_pages * seconds,
        )

    def with_generated(self, num_tokens: int) -> SequenceUsage:
        """With at least `num_tokens` generated ones: more may have arrived since the last report."""
        if num_tokens <= self.num_generated_tokens:
            return self
        return msgspec.structs.replace(self, num_generated_tokens=num_tokens)


def total_usage(usages: Iterable[SequenceUsage]) -> SequenceUsage:
    """The sum of several sequences' usage, of no attempt."""
    columns = zip(*map(msgspec.structs.astuple, usages), strict=True)
    return msgspec.structs.replace(SequenceUsage(*map(sum, columns)), attempt=0)


# What llguidance may take for one grammar: a router tries it within the same as a gang compiles it.

GRAMMAR_LIMITS: Final = LLParserLimits(  # the library's own, but for memory, and without the grammar in messages
    max_lexer_states=20_000, verbose_errors=False
)


FinishReason = Literal["stop", "length"]
# "gang_lost": its engine has failed. "handed_over": its leader stopped before the sequence had ended. A router
# continues both at another gang; where it cannot, the client gets "gang_lost".
# "taken_over": it was submitted again, by another router or for another of the client's connections.
# "given_back": more tokens came than its router read. The router asks for it again when it has read them all.
# "withdrawn": its router asked for that before it began, to send it elsewhere. "cancelled": its router asked for that.
# "adapter_failed": its adapter is damaged or missing, which the operator must mend. "adapter_overflow": its adapter
# computes numbers that are not finite, which the tenant must mend.
# "store_unavailable": its adapter is not in the gang and cannot be read from the store now. A router tries another
# gang, or the same one after a pause; where that fails too, the client gets the error.
ErrorKind = Literal[
    "invalid_request",
    "adapter_failed",
    "adapter_overflow",
    "store_unavailable",
    "overloaded",
    "timeout",
    "gang_lost",
    "handed_over",
    "taken_over",
    "given_back",
    "withdrawn",
    "cancelled",
    "internal",
]
# Why a sequence is "overloaded": it was expected to wait too long ("wait"), to miss its timeout ("timeout"), or to get
# its first token after its tenant's latency objective ("objective"); too many wait in its gang ("full"), or too many of
# its tenant ("tenant_full"), or for any gang ("no_gang"); or it did wait too long, unexpectedly ("waited").
RefusalReason = Literal["wait", "timeout", "objective", "full", "tenant_full", "no_gang", "waited"]


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter as the engine knows it: never a name.

    `module_ranks` maps a target module ("q_proj", …) to its largest rank over the layers; absent ones are not listed.
    Of an activated LoRA (aLoRA, arXiv 2504.12397) the base computes what stands before the last `invocation_token_ids`
    in the prompt; empty: it is a plain one, and computes all.
    """

    digest: str
    module_ranks: dict[str, int]
    invocation_token_ids: tuple[int, ...] = ()


class SamplingParams(ShapingParams, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next tokens, and when to stop."""

    max_tokens: int | None = None  # None: until the context or the pool is full. 0: only its prompt is computed
    seed: int | None = None
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    rules: TokenRules | None = None  # None: any token is allowed
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False  # the model's own ids only; stop_token_ids still stop
    num_logprobs: int | None = None  # None: none. 0: the chosen token's. k: also the k most likely ones
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens, without regard to all of the above
    grammar: str = ""  # of the whole answer: llguidance's Lark text; empty: any text
    pooling: Pooling | None = None  # with max_tokens 0: an embedding of the prompt is computed, and no token chosen

    @property
    def has_penalty(self) -> bool:
        """Choosing a token depends on which ones the sequence has already."""
        return penalty_numbers(self) != NO_PENALTIES or (self.rules is not None and self.rules.looks_back)


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to grow.

    `generated_token_ids` were generated by another gang: the sequence continues after them, and updates bring only new
    tokens. Greedy ones, and those drawn with a seed, are the tokens that the other gang would have generated.

    A sequence with a `key` survives the stream that it was submitted on: it goes on as an orphan for a while, and a
    request of the same tenant with the same key, adapter, prompt and sampling is answered with the tokens that it has
    and will have (`sequence_journal.py`).

    Times are sent as seconds that are left, since the clocks of two machines differ.
    """

    sequence_id: int = 0  # the sender's choice, unique among its unfinished sequences; a router's connection sets it
    prompt_token_ids: list[int]
    sampling: SamplingParams
    tenant: str
    adapter: AdapterRef | None = None  # None: the base
    adapter_name: str = ""  # as its tenant calls it: for logs and status only
    owner: str = ""  # owner of the private adapter; only routers use it
    generated_token_ids: list[int] = []
    num_scored: int = 0  # tokens of the prompt whose log-probabilities other gangs have already sent
    usage: SequenceUsage | None = None  # its cost at other gangs, as last reported; counting goes on from there
    attempt: int = 0  # chosen anew where a client resumes its stream, as another gang may begin the sequence again
    cache_salt: str = ""  # sequences of one tenant share KV only if this is the same
    request_id: str = ""  # of the request that it belongs to: for the gang's log
    key: str = ""  # names it among its tenant's sequences, on all gangs; empty: it cannot be requested again
    has_begun: bool = False  # a client has had tokens of it: it is never refused because a queue is full
    is_resumed: bool = False  # its client resumes it: it is handed over even if another stream reads it
    was_admitted: bool = False  # it waited in another gang's queue: it is not refused because a queue is full either
    wait_s: float | None = None  # it is given up if it still waits after so long; None: it waits as long as it takes
    timeout_s: float | None = None  # it is given up, waiting or running, after so long; None: never
    weight: float = 1.0  # its tenant's share of what the gang computes, beside those of others
    priority: int = 0  # among its tenant's sequences, the higher one goes first
    is_background: bool = False  # it yields to everybody else's
    # A beam search after the prompt: updates bring its rounds. `sampling` says nothing of how beams are chosen.
    beams: BeamRules | None = None
    beams_so_far: BeamsSoFar | None = None  # of the search at other gangs: it goes on from there; None: it is new


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a sequence. One more update follows: it has ended meanwhile, or has the error "cancelled" and its usage.

    Unknown and finished ids are ignored.
    """

    sequence_id: int


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Give the sequence back if it still waits: an update with the error "withdrawn" follows. One that runs goes on."""

    sequence_id: int


class Disown(msgspec.Struct, frozen=True, tag="disown"):
    """Cancel orphans: they continue at another gang or were given up, so no router will ask for them.

    `names`: tenant and key of each. None: all that earlier streams of this router's connection have left, as it has
    submitted those again that it goes on with.
    """

    names: list[tuple[str, str]] | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: SequenceRequest


class SubmitPart(msgspec.Struct, frozen=True, tag="part"):
    """A part of an encoded `Submit` that is too long for one message. The parts of a request follow one another."""

    sequence_id: int
    data: bytes
    is_last: bool


class Outdated(msgspec.Struct, frozen=True, tag="outdated"):
    """A hint that no name points to the adapter any more: it is evicted first, until another sequence uses it."""

    digest: str


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    """Digests of adapters that the gang is to keep in its host memory, as far as this router knows.

    `is_whole`: `came` lists all of them; otherwise it lists those added since the last message.
    """

    came: list[str] = []
    went: list[str] = []
    is_whole: bool = False


News = Outdated | ServedElsewhere | Pinned  # about no particular sequence
ToLeaderMessage = Submit | Cancel | Withdraw | Disown | News


class ToLeader(msgspec.Struct, frozen=True):
    """What a router sends: all messages since the last time it sent any."""

    messages: list[ToLeaderMessage | SubmitPart]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logs of the probability before temperature, top-k and the like."""

    chosen: float
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceError(msgspec.Struct, frozen=True):
    kind: ErrorKind
    message: str
    retry_after_s: float | None = None  # of "overloaded": when it may be worth another try, if known
    reason: RefusalReason | None = None  # of "overloaded"


CANCELLED: Final = SequenceError("cancelled", "it was cancelled")


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step brought for one sequence. After a `finish_reason` or an `error` no more updates follow.

    A token that stopped the sequence (end-of-sequence or a stop id) is the last of `token_ids`, with finish_reason
    "stop"; it counts as a completion token, and its text is not shown.
    """

    sequence_id: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, if requested
    finish_reason: FinishReason | None = None
    error: SequenceError | None = None
    num_cached_tokens: int | None = None  # tokens of its prompt that were not computed; with its first token, else None
    computing_s: float | None = None  # since a step was first planned for it, to its first token; with that, else None
    # With its first token, its last update, every few pages between, and chunks of a long prompt; else None.
    usage: SequenceUsage | None = None
    # Of the prompt's next tokens, if requested: all of them come before the first of `token_ids`, or with it.
    prompt_scores: PromptScores | None = None
    embedding: bytes | None = None  # of the prompt, if requested: a packed vector, with the last update
    beam_rounds: list[BeamRound] | None = None  # of a beam search, whose updates have no tokens


class ResidencyChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Adapters, by digest, that came into a gang's pool or began to, and those that went, since the last change.

    One that came and went in between is listed as gone, so a digest that is listed as gone may be unknown. The same for
    full pages of KV, by `short_key` of `page_keys.py`, and for adapters in the host memory of the gang's workers, by
    `short_digest`. `pin_news`: by `short_digest`, why a pinned adapter cannot be kept there; empty: it can again.
    """

    came: list[str] = []
    went: list[str] = []
    pages_came: list[int] = []
    pages_went: list[int] = []
    hosted_came: list[int] = []
    hosted_went: list[int] = []
    pin_news: dict[int, str] = {}


class OrphanChange(msgspec.Struct, frozen=True):
    """Keys of orphans: sequences that a gang has begun to keep for any router that asks, or keeps no longer."""

    came: list[str] = []
    went: list[str] = []


class GangInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader sends first to a router that connects."""

    gang_id: str
    model: str  # folder or hub id that the gang serves
    device: str
    dtype: str
    kernels: str  # which kernels compute each operation, for people to read
    max_model_len: int  # tokens, prompt and completion together
    block_size: int  # tokens a page
    num_pages: int
    page_bytes: int
    num_threads: int  # that each worker computes with
    vocab_size: int
    hidden_size: int = 0  # numbers of an embedding
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, int | float] = {}  # the model's own, by the request's field
    max_num_sequences: int = 0  # that can run at once: no more than a step has tokens for
    max_tokens_per_step: int = 0
    is_fair: bool = False  # the tenant served least goes first, and frames say what each tenant was served
    reasons: dict[str, str] = {}  # why sizes are as they are, by setting, for people to read
    num_state_pages: int = 0  # that a sequence's recurrent state takes; 0: the base has none


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    info: GangInfo
    resident: list[str] = []  # digests of adapters that are in the pool or on their way into it
    resident_pages: list[int] = []  # short keys of the full pages of KV that are kept
    orphans: list[str] = []  # keys of sequences that it keeps for any router that asks
    hosted: list[int] = []  # short digests of adapters that are in host memory


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    updates: list[SequenceUpdate]
    load: EngineLoad
    residency: ResidencyChange = ResidencyChange()  # since the last frame on this stream
    orphans: OrphanChange | None = None  # since the last frame on this stream
    last_submitted: int = 0  # id of this router's newest sequence that has reached the leader; 0: none has
    shares: list[TenantShare] = []  # of tenants whose share has changed; not all of them each time


FromLeader = Hello | Frame
