"""What can go wrong with an adapter, from upload to load, and with the registry that knows of it.

```
AdapterError
├── AdapterInvalid        the upload is wrong: says what, and what is accepted (HTTP 400)
├── UploadTooLarge        over a size limit (HTTP 413)
├── RegistryUnavailable   Redis does not answer; the same call is safe to repeat later (HTTP 503)
├── AdapterCorrupt        the store cannot give an adapter back, whole (its own requests fail, no others)
├── KeyTaken              an API key is another tenant's already (a launch is refused)
└── OtherBase             a store or registry holds adapters of another base (a launch is refused)
```
"""

from __future__ import annotations


class AdapterError(Exception):
    """`str()` of it is fit for the client."""


class AdapterInvalid(AdapterError):  # noqa: N818
    pass


class UploadTooLarge(AdapterError):  # noqa: N818
    pass


class RegistryUnavailable(AdapterError):  # noqa: N818
    pass


class AdapterCorrupt(AdapterError):  # noqa: N818
    pass


class KeyTaken(AdapterError):  # noqa: N818
    pass


class OtherBase(AdapterError):  # noqa: N818
    pass


def shown(value: object, limit: int = 80) -> str:
    """A foreign value as it may stand in a message: escaped and never long."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def listed(values: list[str], limit: int = 3) -> str:
    """The first few of many values, and how many more there are."""
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(shown(value, 160).strip("'\"") for value in values[:limit]) + more
