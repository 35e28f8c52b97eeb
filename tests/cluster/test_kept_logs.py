"""Which logs of a run outlive it, and how many runs' there are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.launch.janitor import (
    KEPT_RUNS,
    LOGS_OF_SESSION,
    MAX_FILE_BYTES,
    MAX_RUN_BYTES,
    FoundLog,
    chosen,
    keep_logs,
)

SIZES = st.integers(0, 2 * MAX_FILE_BYTES)


@given(st.lists(st.builds(FoundLog, st.just(Path("a")), SIZES, st.floats(0, 1e9)), max_size=30))
def test_the_newest_are_kept_within_bounds(found: list[FoundLog]) -> None:
    kept = chosen(found)
    assert sum(num_bytes for _, num_bytes in kept) == min(
        MAX_RUN_BYTES, sum(min(log.num_bytes, MAX_FILE_BYTES) for log in found)
    )
    assert all(0 < num_bytes <= min(log.num_bytes, MAX_FILE_BYTES) for log, num_bytes in kept)
    times = [log.written_at for log, _ in kept]
    assert times == sorted(times, reverse=True)
    left_out = [log for log in found if log.num_bytes and log not in [one for one, _ in kept]]
    assert all(log.written_at <= min(times) for log in left_out)


def test_runs_are_kept_up_to_a_number_each_with_its_files(tmp_path: Path) -> None:
    session = tmp_path / "session"
    logs = session / LOGS_OF_SESSION
    (logs / "motet").mkdir(parents=True)
    (logs / "raylet.out").write_bytes(b"a")
    (logs / "linked").symlink_to(logs / "raylet.out")
    for run in range(KEPT_RUNS + 2):
        (logs / "motet" / "gang.log").write_text(f"{run}")
        keep_logs(session, tmp_path / "logs" / f"2026-{run}")
    kept = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in kept] == [f"2026-{run}" for run in range(2, KEPT_RUNS + 2)]
    assert [(path / "motet" / "gang.log").read_text() for path in kept] == [path.name[-1] for path in kept]
    assert not (kept[0] / "linked").exists() and (kept[0] / "raylet.out").read_bytes() == b"a"


def test_of_a_long_file_its_end_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "session" / LOGS_OF_SESSION
    logs.mkdir(parents=True)
    with (logs / "a.log").open("wb") as file:
        file.write(b"first")
        file.truncate(MAX_FILE_BYTES)
        file.seek(0, 2)
        file.write(b"last")
    keep_logs(tmp_path / "session", tmp_path / "1")
    kept = (tmp_path / "1" / "a.log").read_bytes()
    assert len(kept) == MAX_FILE_BYTES and kept.endswith(b"last") and b"first" not in kept


def test_a_ray_that_did_not_start_leaves_nothing(tmp_path: Path) -> None:
    keep_logs(tmp_path / "session", tmp_path / "1")
    assert not (tmp_path / "1").exists()
