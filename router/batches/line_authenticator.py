"""Whose a line of a batch is: of the key, or the token, that made the batch, as that is now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from msgspec import structs
from starlette.requests import Request
from starlette.types import Scope as AsgiScope

from ...adapters.registry.batches.records import BatchRecord
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import KeyRecord, Scope
from ..http.auth import Identity, admitted
from ..http.errors import unknown_key

_BATCH: Final = "motet.batch"  # in a line's scope, which no client makes


def scope_of(batch: BatchRecord) -> AsgiScope:
    """What a line's scope has for `LineAuthenticator`."""
    return {_BATCH: batch}


def is_line(scope: AsgiScope) -> bool:
    """Whether the request is a line of a batch."""
    return _BATCH in scope


class LineAuthenticator:
    def __init__(self, view: RegistryView, clock: Callable[[], float] = time.time) -> None:
        self._view, self._clock = view, clock

    def identify(self, request: Request, scope: Scope) -> Identity:
        """As `Authenticator.identify`; the line yields to all other work of its tenant and of others."""
        batch: BatchRecord = request.scope[_BATCH]
        identity = admitted(request, self._view, self._key_of(batch), batch.subject, scope, self._clock())
        if identity.tenant.incarnation != batch.incarnation:
            raise unknown_key()
        background = structs.replace(identity.tenant, is_background=True)
        return replace(identity, tenant=background)

    def check_operator(self, request: Request) -> None:
        raise unknown_key()

    def _key_of(self, batch: BatchRecord) -> KeyRecord | None:
        """A token counts as long as its batch: it was good when that was made."""
        if batch.token is not None:
            if not self._view.keys.has_tenant(batch.tenant):
                return None
            return structs.replace(batch.token, expires_at=None)
        entry = self._view.keys.key_with_id(batch.key_id)
        return entry[1] if entry is not None and entry[1].tenant == batch.tenant else None
