"""Secrets that were typed as arguments, moved to where other users of the machine do not see them.

Everybody may read the arguments of every process. So a program that was started with a key among them starts itself
again at once, in the same process, with the key in its environment, which only its owner may read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ..client.client_options import KEY_VARIABLE
from ..settings.setting_field import fields_of
from ..settings.settings import Settings


def hide_secrets() -> None:
    """Returns if there was nothing to hide; else restarts the program."""
    options = settings_with_secrets() if {"serve", "doctor"} & set(sys.argv[1:2]) else {"--key": KEY_VARIABLE}
    rest, variables = without_secrets(sys.argv[1:], options)
    if not variables:
        return
    print(
        f"Warning: what is typed as an argument shows in lists of processes and in the shell's history; motet has "
        f"hidden it, but a file or {' and '.join(variables)} never shows",
        file=sys.stderr,
        flush=True,
    )
    own = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    os.execve(sys.executable, [*own, *rest], os.environ | variables)


def settings_with_secrets() -> dict[str, str]:
    """Options of `motet serve` whose values are secrets, and the variables that say the same."""
    return {field.option: field.mark.env for field in fields_of(Settings) if field.mark.secret}


def without_secrets(arguments: Sequence[str], options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without these options, and what the options' variables must be instead.

    An option that is given more than once is a list, which a variable holds with spaces between.
    """
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    given = iter(arguments)
    for argument in given:
        option, has_value, value = argument.partition("=")
        if argument == "--":
            rest += [argument, *given]
        elif argument in options and (following := next(given, None)) is not None:
            found.setdefault(options[argument], []).append(following)
        elif has_value and option in options:
            found.setdefault(options[option], []).append(value)
        else:
            rest.append(argument)
    return rest, {variable: " ".join(values) for variable, values in found.items()}
