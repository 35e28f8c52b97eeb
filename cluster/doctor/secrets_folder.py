"""Checks the folder of secrets: its files and their permissions. Their contents are neither kept nor shown."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .finding import Finding, error, ok, warning

CHECK = "secrets"
VARIABLE = "MOTET_SECRETS_DIR"
# The files, and the environment variable for the same value.
FILES = {"redis-url": "REDIS_URL", "operator-key": "MOTET_OPERATOR_KEY", "keys": "MOTET_KEYS", "cluster-token": ""}


@dataclass(frozen=True, kw_only=True)
class SecretFile:
    mode: int = 0
    problem: str = ""  # why it cannot be read
    is_empty: bool = False
    differs: bool = False  # from its variable


@dataclass(frozen=True, kw_only=True)
class SecretsFacts:
    folder: str  # empty: none is named
    problem: str = ""
    files: Mapping[str, SecretFile] = field(default_factory=dict)


def gather_secrets(environ: Mapping[str, str] = os.environ) -> SecretsFacts:
    folder = environ.get(VARIABLE, "")
    if not folder:
        return SecretsFacts(folder="")
    try:
        names = [path.name for path in Path(folder).iterdir() if not path.name.startswith("..") and path.is_file()]
    except OSError as problem:
        return SecretsFacts(folder=folder, problem=str(problem))
    return SecretsFacts(folder=folder, files={name: _file(Path(folder) / name, environ) for name in sorted(names)})


def redis_url_in(folder: str) -> str | None:
    """The URL of the registry; None: no folder is named (empty), there is no such file, or it cannot be read."""
    if not folder:
        return None
    try:
        return (Path(folder) / "redis-url").read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _file(path: Path, environ: Mapping[str, str]) -> SecretFile:
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text().strip()
    except (OSError, UnicodeDecodeError) as problem:
        return SecretFile(problem=str(problem))
    said = environ.get(FILES.get(path.name, ""), "")
    return SecretFile(mode=mode, is_empty=not text, differs=bool(said) and said.split() != text.split())


def check_secrets(facts: SecretsFacts) -> list[Finding]:
    if not facts.folder:
        return []
    if facts.problem:
        return [
            error(
                CHECK,
                f"the folder of secrets cannot be read: {facts.problem}",
                why="the registry's password and the operators' key are there",
                do=f"mount the Secret at {facts.folder} with fsGroup: 1000, or name another folder with {VARIABLE}",
            )
        ]
    findings = [one for name, file in facts.files.items() for one in _findings_of(facts.folder, name, file)]
    if "redis-url" not in facts.files:
        findings.append(
            warning(
                CHECK,
                f"there is no redis-url in {facts.folder}",
                why="every node of a cluster needs the same registry",
                do="add a key redis-url to the Secret, or set REDIS_URL",
            )
        )
    return findings or [ok(CHECK, f"{', '.join(facts.files)} in {facts.folder}")]


def _findings_of(folder: str, name: str, file: SecretFile) -> list[Finding]:
    path = f"{folder}/{name}"
    if name not in FILES:
        known = ", ".join(FILES)
        return [warning(CHECK, f"{path} is not used", why="it may be misspelt", do=f"the known files are {known}")]
    if file.problem:
        do = "set the pod's securityContext.fsGroup: 1000, and the volume's defaultMode: 0440"
        return [error(CHECK, f"{path} cannot be read: {file.problem}", why="motet does not start", do=do)]
    if file.is_empty:
        return [error(CHECK, f"{path} is empty", why="motet does not start", do=f"set {name} in the Secret")]
    if file.differs:
        variable = FILES[name]
        return [
            error(
                CHECK,
                f"{path} and {variable} have different values",
                why="motet does not start, since it cannot know which one is right",
                do=f"remove {variable} from the environment",
            )
        ]
    if file.mode & stat.S_IROTH:
        return [
            warning(
                CHECK,
                f"all users may read {path} (mode {file.mode:04o})",
                why="another process in the container can read it",
                do="set defaultMode: 0400 of the Secret's volume, with fsGroup: 1000; for your own file, chmod 600",
            )
        ]
    return []
