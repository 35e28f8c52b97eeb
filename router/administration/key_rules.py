"""What a key may give to keys that it makes: no more than it has itself."""

from __future__ import annotations

from msgspec import structs

from ...adapters.registry.tenants.records import KeyRecord, Quota
from ..openai_api.errors import ApiError, invalid_value
from .bodies import KeyBody


def within(wanted: KeyRecord, body: KeyBody, maker: KeyRecord) -> KeyRecord:
    """`wanted` with what the maker's own bounds leave of it, where `body` leaves that open.

    Raises 403 for scopes that the maker lacks and for a maker that has a quota, 400 if no scope is left.
    """
    _check_unbounded(maker)
    if body.scopes is None:
        wanted = structs.replace(wanted, scopes=wanted.scopes & maker.scopes)
        if not wanted.scopes:
            raise invalid_value("scopes", "this key may give admin only: name it.")
    _check_scopes(wanted, maker)
    expires_at = maker.expires_at
    if expires_at is not None and wanted.expires_at is not None:
        expires_at = min(expires_at, wanted.expires_at)
    return structs.replace(wanted, expires_at=wanted.expires_at if expires_at is None else expires_at)


def check_not_beyond(key: KeyRecord, maker: KeyRecord) -> None:
    """Raises 403 if the key may do what its maker may not: then the maker gets no new one in its place."""
    _check_unbounded(maker)
    _check_scopes(key, maker)
    if maker.expires_at is not None and (key.expires_at is None or key.expires_at > maker.expires_at):
        message = "This API key ends earlier than the one to be replaced."
        raise ApiError(403, message, code="missing_scope")


def _check_unbounded(maker: KeyRecord) -> None:
    """Each key has its own quota, so a key with a quota may not make keys: each would be a fresh quota."""
    if maker.quota != Quota():
        message = "This API key has a quota, so it can neither make nor rotate keys: use one without a quota."
        raise ApiError(403, message, code="missing_scope")


def _check_scopes(key: KeyRecord, maker: KeyRecord) -> None:
    lacking = sorted(key.scopes - maker.scopes)
    if lacking:
        message = f"This API key lacks the scope {lacking[0]}, and cannot give it to another one."
        raise ApiError(403, message, code="missing_scope")
