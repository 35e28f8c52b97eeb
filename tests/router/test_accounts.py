"""What accountants learn of an answer: before it is made, and before its last bytes go out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.tenancy.account import Account, Accounts, AnswerRequest, Ending, Progress

NOTHING = Progress(num_prompt_tokens=0, num_cached_tokens=0, num_completion_tokens=0)


class Book:
    """Keeps what it receives; refuses with an error if it has one."""

    def __init__(self, name: str, log: list[str], refusal: ApiError | None = None) -> None:
        self._name, self._log, self._refusal = name, log, refusal

    async def open(self, requested: AnswerRequest) -> Account:
        self._log.append(f"{self._name} opens")
        if self._refusal is not None:
            raise self._refusal
        return _Line(self._name, self._log)


class _Line:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        return [(b"x-book", self._name.encode())]

    def settle(self, ending: Ending) -> None:
        self._log.append(f"{self._name} settles {ending.error or ending.progress.num_completion_tokens}")


def requested() -> AnswerRequest:
    return AnswerRequest(
        identity=Identity(TenantRecord(name="acme"), KeyRecord(key_id="k", tenant="acme")),
        response_id="cmpl-1",
        model="base",
        version=None,
        user="",
        num_prompt_tokens=3,
        num_new_tokens=5,
        num_sequences=1,
        is_resumed=False,
        progress=lambda: NOTHING,
    )


async def test_all_open_in_order_and_all_settle() -> None:
    log: list[str] = []
    account = await Accounts([Book("a", log), Book("b", log)]).open(requested())
    assert account.headers == [(b"x-book", b"a"), (b"x-book", b"b")]
    progress = Progress(num_prompt_tokens=3, num_cached_tokens=0, num_completion_tokens=4)
    account.settle(Ending(progress=progress, error="", is_cancelled=False, first_token_s=0.1, duration_s=0.2))
    assert log == ["a opens", "b opens", "a settles 4", "b settles 4"]


async def test_what_one_refuses_is_settled_at_those_before_it_and_opened_at_none_behind() -> None:
    log: list[str] = []
    refusal = ApiError(429, "too much", code="quota")
    with pytest.raises(ApiError, match="too much"):
        await Accounts([Book("a", log), Book("b", log, refusal), Book("c", log)]).open(requested())
    assert log == ["a opens", "b opens", "a settles quota"]
