"""Threads for tenants' jobs: the tenant that has used the least CPU goes first, and costly jobs run at low priority."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_HALF_LIFE_S = 10.0  # of a tenant's recent usage
_STUCK = 5  # times `costly_s`, after which a running job gets its thread for itself
_CLOSE_S = 5.0  # that closing waits for a job to end
_MOST_TENANTS = 1024  # whose usage is kept
_LOWEST_PRIORITY = 19  # as `nice` counts


@dataclass(eq=False)
class _Tenant:
    jobs: deque[Callable[[], None]] = field(default_factory=deque)
    used_s: float = 0.0  # recently
    num_jobs: float = 0.0  # recently
    updated_at: float = 0.0

    def charge(self, seconds: float, num_jobs: int, now: float) -> None:
        share = 0.5 ** ((now - self.updated_at) / _HALF_LIFE_S)
        self.used_s, self.num_jobs = self.used_s * share + seconds, self.num_jobs * share + num_jobs
        self.updated_at = now


@dataclass(eq=False)
class _Worker:
    """A thread and its current job, after which it can be ended."""

    yields: bool  # runs costly jobs at the lowest priority
    thread_id: int = 0
    cpu_clock: int = time.CLOCK_MONOTONIC  # its thread's CPU time, where the system has such a clock
    tenant: _Tenant | None = None
    began_at: float = 0.0  # by the clock that jobs are charged by
    is_replaced: bool = False


class FairThreads:
    """Two threads. Jobs of tenants whose jobs have been costly run in the second one, at the lowest priority.

    So a tenant's costly jobs delay only its own jobs, and take no processor time from steps or from other tenants. If
    a running job turns out to be costly, its thread gets that priority and another thread takes over the other jobs.
    The cost of a job is its CPU time, so that waiting for a busy processor does not make it costly.
    """

    def __init__(
        self, name: str, costly_s: float, stack_bytes: int = 0, clock: Callable[[], float] | None = None
    ) -> None:
        """`costly_s`: a tenant's jobs are costly if they take more on average. `stack_bytes`: 0: the default.

        `clock`: for all times; None: the system's.
        """
        self._name, self._costly_s, self._stack_bytes = name, costly_s, stack_bytes
        self._clock = clock or time.perf_counter
        self._taken_s: Callable[[_Worker], float] = _cpu_s if clock is None else lambda worker: clock()
        self._tenants: dict[str, _Tenant] = {}
        self._wake = threading.Condition()
        self._is_closing = False
        self._prompt: _Worker | None = None  # None: there was no job yet
        self._threads: list[threading.Thread] = []

    def submit(self, tenant: str, job: Callable[[], None]) -> None:
        """The job must not raise."""
        with self._wake:
            if self._prompt is None:
                self._start(_Worker(yields=True))
            self._replace_stuck()
            self._tenants.setdefault(tenant, _Tenant()).jobs.append(job)
            self._wake.notify_all()

    def close(self) -> None:
        """Drops jobs that have not begun. A job that does not end runs until the process ends."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _replace_stuck(self) -> None:
        """Starts a thread for prompt jobs if there is none, or if its job has turned out to be costly."""
        stuck = self._prompt
        taken_s = 0.0 if stuck is None or stuck.tenant is None else self._taken_s(stuck) - stuck.began_at
        if stuck is not None and taken_s <= _STUCK * self._costly_s:
            return
        if stuck is not None and stuck.tenant is not None:
            stuck.is_replaced = True
            stuck.tenant.charge(taken_s, 0, self._clock())
            _yield_to_others(stuck.thread_id)
        self._prompt = _Worker(yields=False)
        self._start(self._prompt)

    def _start(self, worker: _Worker) -> None:
        if self._is_closing:
            return
        usual = threading.stack_size(self._stack_bytes)
        try:
            part = "costly" if worker.yields else "prompt"
            thread = threading.Thread(target=self._run, args=(worker,), name=f"{self._name}-{part}", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _run(self, worker: _Worker) -> None:
        worker.thread_id = threading.get_native_id()
        if hasattr(time, "pthread_getcpuclockid"):
            worker.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        if worker.yields:
            _yield_to_others(worker.thread_id)
        while (job := self._next(worker)) is not None:
            job()
            self._end_job(worker)

    def _end_job(self, worker: _Worker) -> None:
        with self._wake:
            assert worker.tenant is not None
            worker.tenant.charge(self._taken_s(worker) - worker.began_at, 1, self._clock())
            worker.tenant = None
            self._wake.notify_all()  # the tenant's other jobs may belong to the other thread now

    def _next(self, worker: _Worker) -> Callable[[], None] | None:
        """Waits for a job. None: the thread ends."""
        with self._wake:
            while not (self._is_closing or worker.is_replaced):
                due = [each for each in self._tenants.values() if each.jobs and self._is_costly(each) == worker.yields]
                if due:
                    worker.tenant = min(due, key=lambda each: each.used_s)
                    worker.began_at = self._taken_s(worker)
                    return worker.tenant.jobs.popleft()
                if len(self._tenants) > _MOST_TENANTS:
                    self._forget_some()
                self._wake.wait()
            return None

    def _is_costly(self, tenant: _Tenant) -> bool:
        return tenant.used_s > self._costly_s * max(tenant.num_jobs, 1)

    def _forget_some(self) -> None:
        """Forgets half of the tenants without jobs: those that were charged longest ago."""
        idle = sorted((name for name, each in self._tenants.items() if not each.jobs), key=self._updated_at)
        for name in idle[: len(idle) // 2]:
            del self._tenants[name]

    def _updated_at(self, name: str) -> float:
        return self._tenants[name].updated_at


def _cpu_s(worker: _Worker) -> float:
    return time.clock_gettime(worker.cpu_clock)


def _yield_to_others(thread_id: int) -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, thread_id, _LOWEST_PRIORITY)
