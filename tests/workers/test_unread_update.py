"""What is unread of a sequence: no token is lost or reported twice, pieces fit, and growing costs what is added."""

from __future__ import annotations

import math
import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from motet.workers.wire.messages import SequenceError, SequenceUpdate, SequenceUsage, TokenLogprobs
from motet.workers.wire.prompt_scores import PromptScores, row_bytes
from motet.workers.wire.unread_update import UnreadUpdate, update_bytes

F32 = st.floats(width=32, allow_nan=False)
IDS = st.integers(0, 2**32 - 1)


@st.composite
def logprobs(draw: st.DrawFn) -> TokenLogprobs:
    ids = draw(st.lists(IDS, max_size=5))
    return TokenLogprobs(draw(F32), ids, draw(st.lists(F32, min_size=len(ids), max_size=len(ids))))


@st.composite
def histories(draw: st.DrawFn) -> list[SequenceUpdate]:
    """Updates of one sequence, of which only the last ends it. Scores of its prompt come before its tokens."""
    has_logprobs = draw(st.booleans())
    num_top = draw(st.sampled_from([0, 1, 20]))
    updates = [
        SequenceUpdate(7, prompt_scores=PromptScores(num_top, draw(st.binary(min_size=size, max_size=size))))
        for size in draw(st.lists(st.integers(1, 9).map(lambda rows: rows * row_bytes(num_top)), max_size=4))
    ]
    for number in range(draw(st.integers(1, 6))):
        token_ids = draw(st.lists(IDS, max_size=6))
        rows = [draw(logprobs()) for _ in token_ids] if has_logprobs else None
        started = draw(st.integers(0, 9)) if number == 0 and draw(st.booleans()) else None
        taken = SequenceUsage(number + 0.3, number / 7) if draw(st.booleans()) and token_ids else None
        updates.append(SequenceUpdate(7, token_ids, rows, num_cached_tokens=started, usage=taken))
    end = draw(st.sampled_from([None, "stop", SequenceError("timeout", "ü" * 30)]))
    field = "error" if isinstance(end, SequenceError) else "finish_reason"
    return [*updates[:-1], msgspec.structs.replace(updates[-1], **{field: end})]


def joined(updates: list[SequenceUpdate]) -> tuple[object, ...]:
    tokens = [token for update in updates for token in update.token_ids]
    rows = [row for update in updates for row in update.logprobs or ()]
    started = [update.num_cached_tokens for update in updates if update.num_cached_tokens is not None]
    taken = [update.usage for update in updates if update.usage is not None]
    scores = b"".join([update.prompt_scores.data for update in updates if update.prompt_scores is not None])
    return tokens, rows, updates[-1].finish_reason, updates[-1].error, started, taken[-1:], scores


def room_for_both(piece: SequenceUpdate, num_bytes: int) -> bool:
    """A row of scores or a token goes out even if neither fits."""
    smallest = 0 if piece.prompt_scores is None else row_bytes(piece.prompt_scores.num_top)
    return update_bytes(SequenceUpdate(7, error=piece.error)) + smallest + 100 < num_bytes


@given(histories(), st.integers(1, 1000), st.data())
def test_pieces_are_what_came(history: list[SequenceUpdate], num_bytes: int, data: st.DataObject) -> None:
    unread = UnreadUpdate(history[0])
    reported = []
    for update in history[1:]:
        if data.draw(st.booleans()):
            reported.append(unread.take(num_bytes)[0])
        unread.add(update)
    is_all = False
    while not is_all:
        assert unread or not reported or not history[-1].token_ids
        most = unread.max_bytes
        piece, is_all = unread.take(num_bytes)
        reported.append(piece)
        size = len(msgspec.msgpack.encode(piece))
        assert size <= min(update_bytes(piece), most)
        num_scores = 0 if piece.prompt_scores is None else piece.prompt_scores.num_rows
        assert size <= num_bytes or len(piece.token_ids) + num_scores <= 1 or not room_for_both(piece, num_bytes)
    assert joined(reported) == joined(history)
    assert all(piece.finish_reason is None and piece.error is None for piece in reported[:-1])


def test_an_unread_token_takes_little_memory_and_time() -> None:
    """20 likely tokens take 1.7 kB as objects. Twice as many tokens take twice the time, however they come."""

    def grown(num_tokens: int) -> tuple[UnreadUpdate, float]:
        row = TokenLogprobs(-1.0, list(range(1000, 1020)), [-2.0] * 20)
        began_at = time.process_time()
        unread = UnreadUpdate(SequenceUpdate(1))
        for token in range(num_tokens):
            unread.add(SequenceUpdate(1, [token], [row]))
        return unread, time.process_time() - began_at

    unread, _ = grown(1000)
    assert unread.num_added_values == 1000 * (2 + 40)
    short = min(grown(4_000)[1] for _ in range(3))
    long = min(grown(32_000)[1] for _ in range(3))
    assert long < 3 * 8 * short
    assert not math.isnan(long)


def test_the_end_of_a_long_update_leaves_room_for_its_tokens() -> None:
    """Its tokens came with its end, and are reported in pieces as large as any."""
    rows = [TokenLogprobs(-1.0, [*range(20)], [-2.0] * 20)] * 5000
    unread = UnreadUpdate(SequenceUpdate(7, [1] * 5000, rows, "stop"))
    num_bytes, num_pieces, is_all = 1 << 15, 0, False
    while not is_all:
        piece, is_all = unread.take(num_bytes)
        num_pieces += 1
        assert len(msgspec.msgpack.encode(piece)) <= num_bytes
    assert piece.finish_reason == "stop"
    assert num_pieces < 2 * update_bytes(SequenceUpdate(7, [1] * 5000, rows)) / num_bytes
