"""Checks the data folder and the folder of secrets."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..settings.setting_field import format_byte_size
from .machine_checks import Finding, error, ok, warning

# Checks the folder of secrets: its files and their permissions. Their contents are neither kept nor shown.

SECRETS = "secrets"
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
                SECRETS,
                f"the folder of secrets cannot be read: {facts.problem}",
                why="the registry's password and the operators' key are there",
                do=f"mount the Secret at {facts.folder} with fsGroup: 1000, or name another folder with {VARIABLE}",
            )
        ]
    findings = [finding for name, file in facts.files.items() for finding in _findings_of(facts.folder, name, file)]
    if "redis-url" not in facts.files:
        findings.append(
            warning(
                SECRETS,
                f"there is no redis-url in {facts.folder}",
                why="every node of a cluster needs the same registry",
                do="add a key redis-url to the Secret, or set REDIS_URL",
            )
        )
    return findings or [ok(SECRETS, f"{', '.join(facts.files)} in {facts.folder}")]


def _findings_of(folder: str, name: str, file: SecretFile) -> list[Finding]:
    path = f"{folder}/{name}"
    if name not in FILES:
        names = ", ".join(FILES)
        return [warning(SECRETS, f"{path} is not used", why="it may be misspelt", do=f"the known files are {names}")]
    if file.problem:
        do = "set the pod's securityContext.fsGroup: 1000, and the volume's defaultMode: 0440"
        return [error(SECRETS, f"{path} cannot be read: {file.problem}", why="motet does not start", do=do)]
    if file.is_empty:
        return [error(SECRETS, f"{path} is empty", why="motet does not start", do=f"set {name} in the Secret")]
    if file.differs:
        variable = FILES[name]
        return [
            error(
                SECRETS,
                f"{path} and {variable} have different values",
                why="motet does not start, since it cannot know which one is right",
                do=f"remove {variable} from the environment",
            )
        ]
    if file.mode & stat.S_IROTH:
        return [
            warning(
                SECRETS,
                f"all users may read {path} (mode {file.mode:04o})",
                why="another process in the container can read it",
                do="set defaultMode: 0400 of the Secret's volume, with fsGroup: 1000; for your own file, chmod 600",
            )
        ]
    return []


# The data folder: room, locks between processes, and files that are replaced in one step.

DATA_FOLDER = "data folder"
LEAST_BYTES = 1 << 30
LEAST_SHARE = 0.1
TIMEOUT_S = 30.0
REST_S = 0.05
# Says whether another process may lock the file.
TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held")
    else:
        print("free")
"""


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    path: str
    problem: str = ""  # why it cannot be used at all
    is_full: bool = False  # nothing can be written, and so nothing else was tried
    free_bytes: int = 0
    total_bytes: int = 0
    locks_hold: bool | None = None  # another process is kept out; None: locks are refused
    replaces: bool = False  # a file takes another's place in one step


def gather_folder(path: Path) -> FolderFacts:
    """Tries the folder, or its nearest parent that exists, with a file that is removed again."""
    folder = _nearest(path)
    trial = folder / f".motet-doctor-{secrets.token_hex(4)}"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as problem:
        return FolderFacts(path=str(path), problem=str(problem))
    facts = FolderFacts(path=str(path), free_bytes=usage.free, total_bytes=usage.total)
    try:
        trial.write_text("old")
        try:
            locks_hold = _locks_hold(trial)
            new = trial.with_suffix(".new")
            new.write_text("new")
            with trial.open() as reader:
                new.replace(trial)
                replaces = reader.read() == "old" and trial.read_text() == "new"
        finally:
            trial.unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired) as problem:
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return replace(facts, is_full=True)
        return replace(facts, problem=str(problem))
    return replace(facts, locks_hold=locks_hold, replaces=replaces)


def _locks_hold(file: Path) -> bool | None:
    with file.open("r+") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", TRY_LOCK, str(file)], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    return tried.stdout.strip() == "held"


def hold_lock(path: Path, trial: str) -> bool:
    """On one node: locks a file, signals that, and holds the lock until the other node has tried it.

    False: it could not lock it, or the other node has not tried.
    """
    file, lock_signal, tried = _trial_files(path, trial)
    with file.open("a+") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        lock_signal.touch()
        return _awaited(tried.exists)


def is_locked_out(path: Path, trial: str) -> bool | None:
    """On another node: whether it is kept out meanwhile. None: it never saw the first node's file."""
    file, lock_signal, tried = _trial_files(path, trial)
    if not _awaited(lambda: lock_signal in _listed(lock_signal.parent)):
        return None
    try:
        with file.open("a+") as mine:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    finally:
        tried.touch()


def remove_trial(path: Path, trial: str) -> None:
    for file in _trial_files(path, trial):
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _trial_files(path: Path, trial: str) -> tuple[Path, Path, Path]:
    """The file to lock, and the two that signal that it is held and that the other node has tried."""
    folder = _nearest(path)
    lock, lock_signal, tried = (folder / f".motet-doctor-{trial}.{kind}" for kind in ("lock", "held", "tried"))
    return lock, lock_signal, tried


def _nearest(path: Path) -> Path:
    """The folder, or the one above in which it would be made."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _listed(folder: Path) -> list[Path]:
    return [folder / name for name in os.listdir(folder)]


def _awaited(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(REST_S)
    return True


def check_folder(facts: FolderFacts) -> list[Finding]:
    if facts.problem:
        return [
            error(
                DATA_FOLDER,
                f"{facts.path} cannot be used: {facts.problem}",
                why="adapters, and what motet keeps between two starts, are there",
                do="a folder that this user may write, named with --data-dir; in a pod a volume, with fsGroup: 1000",
            )
        ]
    findings = [_room(facts)]
    if facts.is_full:
        return findings
    if facts.locks_hold is not True:
        problem = "refuses locks" if facts.locks_hold is None else "does not keep a second process out of a locked file"
        findings.append(
            error(
                DATA_FOLDER,
                f"{facts.path} {problem}",
                why="two processes may change the same file, and a second Redis may start on the same data",
                do="a file system with flock: of NFS version 4, or mount it with local_lock=none",
            )
        )
    if not facts.replaces:
        findings.append(
            error(
                DATA_FOLDER,
                f"{facts.path} does not replace a file in one step",
                why="a reader may see half an adapter",
                do="a POSIX file system (NFS 4, CephFS, a disk), not a bucket that looks like one",
            )
        )
    if len(findings) == 1:
        findings.append(ok(DATA_FOLDER, f"locks hold and files are replaced in one step in {facts.path}"))
    return findings


def _room(facts: FolderFacts) -> Finding:
    free = f"{facts.path} has {format_byte_size(facts.free_bytes)} free of {format_byte_size(facts.total_bytes)}"
    why = "uploads are refused when it is full, and a Redis that writes there ends or refuses every change"
    do = "more room for it, or remove adapters (motet adapters delete): the next sweep frees adapters without a name"
    if facts.is_full:
        return error(DATA_FOLDER, f"no more can be written: {free}", why=why, do=f"first of all make room: {do}")
    if facts.free_bytes < LEAST_BYTES:
        return error(DATA_FOLDER, free, why=why, do=do)
    if facts.free_bytes < LEAST_SHARE * facts.total_bytes:
        return warning(DATA_FOLDER, free, why=why, do=do)
    return ok(DATA_FOLDER, free)


def check_locks_between(first: str, second: str, is_locked: bool, locked_out: bool | None) -> list[Finding]:
    """Findings of two nodes, of which the first has locked a file and the second has tried to."""
    do = "one ReadWriteMany volume with locks (NFS 4, CephFS) at the same path on every node"
    if not is_locked or locked_out is None:
        state = f"{second} does not see what {first} writes into the data folder"
        return [error(DATA_FOLDER, state, why="gangs there would not find adapters that were uploaded", do=do)]
    if not locked_out:
        state = f"a lock of {first} does not hold on {second}"
        return [error(DATA_FOLDER, state, why="two nodes may change the same file at once", do=do)]
    return [ok(DATA_FOLDER, f"a lock of {first} holds on {second}")]
