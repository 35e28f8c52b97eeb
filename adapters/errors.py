"""The errors of adapters, from upload to load, and of the registry.

```
AdapterError
├── AdapterInvalid        the upload is wrong; the message says what, and what is accepted (HTTP 400)
├── NoSuchVersion         a name has no such version or alias (HTTP 404)
│   └── NoSuchName        there is no such name (HTTP 404)
├── NameTaken             there is an adapter of this name already (HTTP 409)
├── VersionRefused        a version cannot become what was requested now; the message says why (HTTP 409)
├── UploadTooLarge        the upload is over a size limit (HTTP 413)
├── UploadUnchecked       the upload could not be checked now; the same may be sent again (HTTP 503)
├── QuotaExceeded         a tenant, or a key, has reached a quota (HTTP 429, code insufficient_quota)
├── RegistryUnavailable   Redis does not answer; the same call may be repeated later (HTTP 503)
│   └── RegistryFull      Redis has no memory left for more (HTTP 507)
├── StoreUnavailable      the store cannot be read now: it may be later, or from another machine (HTTP 503)
├── AdapterCorrupt        the store has an adapter no longer, or damaged; requests for this adapter fail, others do not
├── CallerGone            the request's tenant, or its user, was deleted meanwhile (HTTP 401)
├── TenantExists          there is a tenant of this name already (HTTP 409)
├── TenantEnding          the tenant's deletion has not ended (HTTP 409)
├── NoSuchTenant          (HTTP 404)
├── NoSuchKey             (HTTP 404)
├── NoSuchUser            (HTTP 404)
├── NoSuchFile            (HTTP 404)
├── FileInUse             a batch that has not ended reads the file (HTTP 409)
├── KeyTaken              an API key belongs to another tenant already (a launch is refused)
└── OtherBase             a store or registry holds adapters of another base (a launch is refused)
```
"""

from __future__ import annotations


class AdapterError(Exception):
    """`str(error)` may be sent to the client."""


class AdapterInvalid(AdapterError):  # noqa: N818
    pass


class NoSuchVersion(AdapterError):  # noqa: N818
    pass


class NoSuchName(NoSuchVersion):
    pass


class NameTaken(AdapterError):  # noqa: N818
    pass


class VersionRefused(AdapterError):  # noqa: N818
    pass


class UploadTooLarge(AdapterError):  # noqa: N818
    pass


class UploadUnchecked(AdapterError):  # noqa: N818
    pass


class QuotaExceeded(AdapterError):  # noqa: N818
    pass


class RegistryUnavailable(AdapterError):  # noqa: N818
    pass


class RegistryFull(RegistryUnavailable):
    pass


class StoreUnavailable(AdapterError):  # noqa: N818
    pass


class AdapterCorrupt(AdapterError):  # noqa: N818
    pass


class CallerGone(AdapterError):  # noqa: N818
    pass


class TenantExists(AdapterError):  # noqa: N818
    pass


class TenantEnding(AdapterError):  # noqa: N818
    pass


class NoSuchTenant(AdapterError):  # noqa: N818
    pass


class NoSuchKey(AdapterError):  # noqa: N818
    pass


class TooManyKeys(AdapterError):  # noqa: N818
    pass


class NoSuchUser(AdapterError):  # noqa: N818
    pass


class NoSuchFile(AdapterError):  # noqa: N818
    pass


class FileInUse(AdapterError):  # noqa: N818
    pass


class KeyTaken(AdapterError):  # noqa: N818
    pass


class OtherBase(AdapterError):  # noqa: N818
    pass


def quote(value: object, limit: int = 80) -> str:
    """A value from outside as text for a message: escaped, and at most `limit` characters."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def listed(values: list[str], limit: int = 3) -> str:
    """The first `limit` values as text for a message, and how many more there are."""
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(quote(value, 160).strip("'\"") for value in values[:limit]) + more
