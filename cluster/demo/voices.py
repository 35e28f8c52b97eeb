"""Sends one question to many models at once, and measures the speed and correctness of the answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...examples.demo.styles import Style
from ..client.client import ClientError, MotetClient


@dataclass(frozen=True)
class Voice:
    """The base or an adapter, as a tenant uses it."""

    model: str
    style: Style  # what its answers are checked against
    tenant: str


@dataclass(frozen=True)
class Inquiry:
    """A question to a voice, with its only correct answer."""

    voice: Voice
    question: str
    expected: str


@dataclass(frozen=True)
class Reply:
    """Times are seconds since all inquiries were released. A failed reply has an `error`."""

    inquiry: Inquiry
    text: str
    num_tokens: int
    first_token_s: float
    last_token_s: float
    error: str | None = None

    @property
    def is_right(self) -> bool:
        return self.error is None and self.text.strip() == self.inquiry.expected


@dataclass(frozen=True)
class Speed:
    """The speed of replies that ran at the same time."""

    median_first_token_s: float
    tokens_per_s: float
    num_right: int
    num_replies: int


def ask_all(inquiries: Sequence[Inquiry], clients: dict[str, MotetClient]) -> list[Reply]:
    """One reply to each, in the same order; all are sent at the same time. `clients`: by tenant."""
    with ThreadPoolExecutor(len(inquiries)) as pool:
        released = time.monotonic()
        replies = [pool.submit(_ask, inquiry, clients[inquiry.voice.tenant], released) for inquiry in inquiries]
        return [reply.result() for reply in replies]


def speed_of(replies: Sequence[Reply]) -> Speed:
    """Tokens a second from the release of the questions to the last of these replies."""
    firsts = sorted(reply.first_token_s for reply in replies)
    return Speed(
        median_first_token_s=firsts[len(firsts) // 2],
        tokens_per_s=sum(reply.num_tokens for reply in replies) / max(reply.last_token_s for reply in replies),
        num_right=sum(reply.is_right for reply in replies),
        num_replies=len(replies),
    )


def _ask(inquiry: Inquiry, client: MotetClient, released: float) -> Reply:
    text, num_tokens, first_token_s, error = "", 0, None, None
    try:
        for piece in client.chat(inquiry.voice.model, [{"role": "user", "content": inquiry.question}], max_tokens=64):
            if piece.text and first_token_s is None:
                first_token_s = time.monotonic() - released
            text += piece.text
            num_tokens = piece.completion_tokens or num_tokens
    except ClientError as failure:
        error = str(failure)
    ended_s = time.monotonic() - released
    return Reply(inquiry, text, num_tokens, ended_s if first_token_s is None else first_token_s, ended_s, error)
