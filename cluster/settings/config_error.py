"""What is said of a setting that cannot be taken."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is not acceptable; the message names the key, the value and what would be accepted."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(f"{key} = {value!r}: {accepted}")
        self.key, self.value, self.accepted = key, value, accepted

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.accepted)
