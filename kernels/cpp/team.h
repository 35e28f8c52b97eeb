// The threads that share the work of a kernel: blocks are handed out one by one, to whichever thread is free.
//
// A thread that the system does not run takes no blocks, so no thread waits for it: the caller computes all blocks that no
// other thread has begun. OpenMP gives each thread a fixed share and waits at a barrier for all of them; on cores that
// other processes use as well, a step then lasts as long as the slowest thread is kept from its core.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace motet {

constexpr int kBlocksOfAThread = 4;  // blocks that work is cut into for each thread, so that all end at about one time

inline void pause_core() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The core that runs the calling thread; -1: unknown.
inline int current_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// Leaves threads all cores of their process but one. Does nothing if it has no other, or the system refuses.
inline void keep_off(int core, const std::vector<std::thread::native_handle_type>& threads) {
#if defined(__linux__)
    cpu_set_t others;
    if (core < 0 || sched_getaffinity(getpid(), sizeof others, &others) != 0) return;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (const auto& thread : threads) pthread_setaffinity_np(thread, sizeof others, &others);
#endif
}

// How much of a core a thread gets while it has work.
class CoreShare {
  public:
    // The thread has work from now on.
    void begin() { began_at = std::chrono::steady_clock::now(), ran_before = ran(); }

    // It has none for now. Whether others want its core as much, known after each fifth of a second.
    bool ends_as_others_want_it() {
        wanted += std::chrono::steady_clock::now() - began_at, got += ran() - ran_before;
        if (wanted < kMeasured) return false;
        const bool is_short = 20 * got < 11 * wanted;  // one program that always computes leaves it half
        wanted = got = {};
        return is_short;
    }

  private:
    static constexpr std::chrono::milliseconds kMeasured{200};
    std::chrono::steady_clock::time_point began_at{};
    std::chrono::nanoseconds ran_before{}, wanted{}, got{};

    static std::chrono::nanoseconds ran() {
        timespec time{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    }
};

// The process's helpers, which live as long as it does. One caller at a time is helped; another one works alone.
class Team {
  public:
    // Never destroyed: helpers sleep in it until the process ends.
    static Team& of_process() {
        static Team* team = new Team;
        return *team;
    }

    // Calls `compute(block)` once for each block, on up to `num_threads` threads, the caller among them. Returns when
    // all blocks are computed.
    template <class F>
    void share(int num_threads, int64_t num_blocks, F&& compute) {
        num_threads = std::min(num_threads, kMostThreads);
        if (num_threads < 2 || num_blocks < 2 || is_taken.test_and_set(std::memory_order_acquire)) {
            for (int64_t block = 0; block < num_blocks; block++) compute(block);
            return;
        }
        recruit(num_threads - 1);
        typedef typename std::remove_reference<F>::type Compute;
        call = [](void* what, int64_t block) { (*(Compute*)what)(block); };
        argument = (void*)&compute, total = num_blocks;
        core.store(current_core(), std::memory_order_relaxed);
        unfinished.store(num_blocks, std::memory_order_relaxed);
        // Sequentially consistent, as `num_asleep` is: a helper either sees this ticket or is seen asleep.
        ticket.store(++epoch << 40 | uint64_t(num_threads - 1) << 32 | uint64_t(num_blocks));
        if (num_asleep.load()) wake();
        for (uint64_t seen = ticket.load(std::memory_order_acquire); uint32_t(seen) > 0;)
            if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
                compute(num_blocks - int64_t(uint32_t(seen)));
                unfinished.fetch_sub(1, std::memory_order_acq_rel);
                if (num_asleep.load(std::memory_order_relaxed)) wake();
            }
        for (int tries = 0; unfinished.load(std::memory_order_acquire) > 0; tries++) {
            if (tries < kTriesBeforeYield)
                pause_core();
            else
                std::this_thread::yield();  // the helper may be waiting for this core
        }
        is_taken.clear(std::memory_order_release);
    }

  private:
    static constexpr int kMostThreads = 256;  // helpers of a ticket have eight bits
    static constexpr int kTriesBeforeYield = 1000;
    // Longer than between two operations of a step and shorter than between steps.
    static constexpr std::chrono::microseconds kSpin{50};
    static constexpr std::chrono::microseconds kBetweenWakes{300};
    // Of a helper whose core others use: its work would come late, and the caller waits for it.
    static constexpr std::chrono::milliseconds kRest{1000};

    // Of the current work: its number (24 bits), helpers that may take part (8), blocks that no thread has begun (32).
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> unfinished{0};
    // Written before the ticket. A helper reads them once it has a block, and until that is done they stay.
    alignas(64) void (*call)(void*, int64_t) = nullptr;
    void* argument = nullptr;
    int64_t total = 0;
    uint64_t epoch = 0;
    std::vector<std::thread::native_handle_type> helpers;  // read and written by the caller that is being helped
    int avoided = -1;                                      // the core that they are kept off; likewise
    int wanted = 0;                                        // helpers of its work; written by it, under the mutex
    std::chrono::steady_clock::time_point woken_at{};      // read and written by it
    std::atomic<int> core{-1};                             // the caller's
    std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
    std::mutex mutex;
    std::condition_variable awake;
    std::condition_variable more_wanted;  // helpers that are not wanted wait for it
    std::atomic<int> num_asleep{0};       // of the wanted ones

    // Not after each operation: where no core is free for a helper, waking it costs more than it computes.
    void wake() {
        const auto now = std::chrono::steady_clock::now();
        if (now - woken_at < kBetweenWakes) return;
        woken_at = now;
        // Systems that pack work onto few cores wake a helper where its caller runs, though another core is idle.
        const int own = core.load(std::memory_order_relaxed);
        if (own != avoided) keep_off(avoided = own, helpers);
        std::lock_guard<std::mutex> lock(mutex);
        awake.notify_all();
    }

    // Helpers of earlier work that had more threads stay, and are not woken until they are wanted again.
    void recruit(int count) {
        if (count == wanted) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
            wanted = count;
            awake.notify_all();
            more_wanted.notify_all();
        }
        try {
            while (int(helpers.size()) < count) {
                std::thread helper([this, index = int(helpers.size())] { help(index); });
                helpers.push_back(helper.native_handle());
                helper.detach();
                avoided = -1;
            }
        } catch (const std::system_error&) {
            // The system has no more threads for this process (a container's limit, say): those that there are help.
        }
    }

    static bool is_for(uint64_t seen, int index) { return uint32_t(seen) > 0 && index < int(seen >> 32 & 0xff); }

    // Whether the helper is on the caller's core, which it would only take from the caller: it stands aside then.
    bool is_in_the_way() const {
        const int own = current_core();
        return own >= 0 && own == core.load(std::memory_order_relaxed);
    }

    void help(int index) {
        CoreShare share;
        share.begin();
        for (;;) {
            uint64_t seen = ticket.load(std::memory_order_acquire);
            while (is_for(seen, index) && !is_in_the_way())
                if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
                    call(argument, total - int64_t(uint32_t(seen)));
                    unfinished.fetch_sub(1, std::memory_order_acq_rel);
                    seen = ticket.load(std::memory_order_acquire);
                }
            if (spins(index)) continue;
            if (share.ends_as_others_want_it()) std::this_thread::sleep_for(kRest);
            std::unique_lock<std::mutex> lock(mutex);
            more_wanted.wait(lock, [&] { return index < wanted; });
            num_asleep.fetch_add(1);
            awake.wait(lock, [&] { return index >= wanted || (is_for(ticket.load(), index) && !is_in_the_way()); });
            num_asleep.fetch_sub(1);
            share.begin();
        }
    }

    // Whether there is work for the helper within a short time, on a core of its own.
    bool spins(int index) {
        if (is_in_the_way()) return false;
        const auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; i++) {
                if (is_for(ticket.load(std::memory_order_acquire), index)) return true;
                pause_core();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }
};

// Blocks into which `count` units are cut for the threads.
inline int64_t blocks_of(int64_t count, int num_threads) {
    return num_threads < 2 ? 1 : std::min<int64_t>(count, int64_t(num_threads) * kBlocksOfAThread);
}

// Calls `compute(start, end)` for ranges of `count` units, each unit in one range.
template <class F>
void share_ranges(int64_t count, int64_t num_blocks, int num_threads, F compute) {
    Team::of_process().share(num_threads, num_blocks, [&](int64_t block) {
        compute(count * block / num_blocks, count * (block + 1) / num_blocks);
    });
}

}  // namespace motet
