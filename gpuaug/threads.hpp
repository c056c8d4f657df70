// Work on several threads: prepended to every C++ file that compiled.py builds.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

// Runs `work` on so many threads, this one among them; it takes its share from a counter, as any of them may come late.
// A new thread is started beside its maker as often as not, and then both take turns on one processor while another idles
// (batches of 64 took 3.3 or 6.4 ms, by chance): so it is told to go to another.
template <class Work>
void on_threads(int64_t count, const Work& work) {
    std::vector<std::thread> helpers;
    try {
#if defined(__linux__)
        cpu_set_t others;
        const int here = sched_getcpu();
        const bool known = count > 1 && here >= 0 && here < CPU_SETSIZE &&
                           sched_getaffinity(0, sizeof others, &others) == 0;
        if (known) CPU_CLR(here, &others);
        const bool move = known && CPU_COUNT(&others) > 0;
#endif
        for (int64_t i = 1; i < count; ++i) {
            helpers.emplace_back([&work] { work(); });
#if defined(__linux__)
            if (move) pthread_setaffinity_np(helpers.back().native_handle(), sizeof others, &others);
#endif
        }
    } catch (...) {  // no more threads to be had: the ones there do the work
    }
    work();
    for (auto& helper : helpers) helper.join();
}
