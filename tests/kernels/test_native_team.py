"""The threads that native kernels share, in a program of their own: what the system and earlier work do to them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import motet
from motet.kernels.native.build import COMPILERS
from motet.tests.rigs.patience import PATIENCE_S

CPP = Path(motet.__file__).parent / "kernels" / "cpp"
# `pthread_create` of the program takes the place of the system's, and refuses as a container's limit would.
PROGRAM = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "team.h"

static std::atomic<int> num_allowed{1000}, num_refused{0};

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* given) {
    if (num_allowed.fetch_sub(1) <= 0) {
        num_refused++;
        return EAGAIN;
    }
    typedef int (*Create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    return ((Create)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, start, given);
}

// Whether each of many blocks is computed once by so many threads.
static bool computes(int num_threads) {
    std::vector<int> times(1000);
    motet::Team::of_process().share(num_threads, 1000, [&](int64_t block) { times[block]++; });
    for (int each : times)
        if (each != 1) return false;
    return true;
}

// By thread: how often it has gone to sleep.
static std::map<std::string, long> sleeps() {
    std::map<std::string, long> found;
    DIR* tasks = opendir("/proc/self/task");
    while (dirent* entry = readdir(tasks)) {
        if (entry->d_name[0] == '.') continue;
        std::ifstream status(std::string("/proc/self/task/") + entry->d_name + "/status");
        for (std::string line; std::getline(status, line);)
            if (line.rfind("voluntary_ctxt_switches:", 0) == 0) found[entry->d_name] = atol(line.c_str() + 24);
    }
    closedir(tasks);
    return found;
}

static int fewest_woken(int num_threads, int num_rounds) {
    int fewest = 1000;
    for (int round = 0; round < num_rounds; round++) {
        const auto before = sleeps();
        for (int i = 0; i < 20; i++) {
            if (!computes(num_threads)) return -1;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        int woken = 0;
        for (const auto& each : sleeps()) woken += each.second != before.at(each.first);
        fewest = std::min(fewest, woken);
    }
    return fewest;
}

// Whether the only helper may soon no longer use the core that its caller runs on.
static bool is_kept_off(int core) {
    cpu_set_t own, of_helper;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof own, &own);
    const std::string caller = std::to_string(gettid()), process = std::to_string(getpid());
    for (int i = 0; i < 2000; i++) {
        if (!computes(2)) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        for (const auto& each : sleeps()) {
            if (each.first == caller || each.first == process) continue;
            sched_getaffinity(stoi(each.first), sizeof of_helper, &of_helper);
            if (!CPU_ISSET(core, &of_helper) && CPU_COUNT(&of_helper) > 0) return true;
        }
    }
    return false;
}

// Whether others are found to want the core of a thread that has work for 200 ms.
template <class Work>
static bool is_wanted(Work work) {
    motet::CoreShare share;
    share.begin();
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    while (std::chrono::steady_clock::now() < end) work();
    return share.ends_as_others_want_it();
}

int main(int argc, char** argv) {
    if (!strcmp(argv[1], "refused")) {
        num_allowed = 1;
        bool right = true;
        for (int i = 0; i < 100; i++) right = right && computes(4);
        printf("%d %d", right, num_refused.load());
    } else if (!strcmp(argv[1], "cores")) {
        bool first, second;
        std::thread caller([&] { first = is_kept_off(atoi(argv[2])), second = is_kept_off(atoi(argv[3])); });
        caller.join();
        printf("%d %d", first, second);
    } else if (!strcmp(argv[1], "share")) {
        const bool without = is_wanted([] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
        bool with_core = true;
        for (int i = 0; i < 100 && with_core; i++) with_core = is_wanted([] {});
        printf("%d %d", without, with_core);
    } else {
        bool right = true;
        for (int i = 0; i < 100; i++) right = right && computes(8);
        const int woken = fewest_woken(2, 10);
        for (int i = 0; i < 200; i++) right = right && computes(1 + i % 9);
        printf("%d %d", right && woken >= 0, woken);
    }
    fflush(stdout);
    _exit(0);  // helpers sleep until the process ends
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{CPP}"]
    subprocess.run([compiler, *flags, str(folder / "team.cpp"), "-o", str(folder / "team"), "-ldl"], check=True)
    return folder / "team"


def run(program: Path, *what: str) -> tuple[int, int]:
    done = subprocess.run([str(program), *what], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    return int(first), int(second)


def test_the_threads_that_there_are_compute_where_the_system_refuses_more(program: Path) -> None:
    """And the system call is made once, not at every step."""
    is_right, num_refused = run(program, "refused")
    assert is_right == 1 and num_refused == 1


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads' sleeps are counted by Linux")
def test_helpers_of_work_with_more_threads_sleep_through_work_with_fewer(program: Path) -> None:
    """Of eight threads two are used: at least in one round no more than these wake."""
    is_right, num_woken = run(program, "fewer")
    assert is_right == 1 and num_woken <= 2


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core, or not known"
)
def test_helpers_are_kept_off_the_core_of_their_caller(program: Path) -> None:
    """Also after it has moved to another one."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert run(program, "cores", str(first), str(second)) == (1, 1)


def test_a_helper_learns_that_others_want_its_core(program: Path) -> None:
    """One that sleeps instead, and one that computes, at least once of many times, as other programs run beside it."""
    assert run(program, "share") == (1, 0)
