// Work on several threads: prepended to every C++ file that compiled.py builds.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>

template <class Work>
void* call(void* work) {
    (*static_cast<const Work*>(work))();
    return nullptr;
}
#endif

// Runs `work` on so many threads, this one among them; it takes its share from a counter, as any of them may come late.
// Where no more threads are to be had, those that are there do it.
// A new thread is started beside its maker as often as not, and then both take turns on one processor while another idles
// (batches of 64 took 3.3 or 6.4 ms, by chance): so it is made for another. By its attributes, before it starts: to move
// one that has ended already would move its maker, for good.
template <class Work>
void on_threads(int64_t count, const Work& work) {
#if defined(__linux__)
    std::vector<pthread_t> helpers;
    if (count > 1) {
        cpu_set_t others;
        pthread_attr_t attributes;
        const int here = sched_getcpu();
        if (pthread_attr_init(&attributes) == 0) {
            if (here >= 0 && here < CPU_SETSIZE && sched_getaffinity(0, sizeof others, &others) == 0) {
                CPU_CLR(here, &others);
                if (CPU_COUNT(&others) > 0) pthread_attr_setaffinity_np(&attributes, sizeof others, &others);
            }
            helpers.reserve(count - 1);
            pthread_t helper;
            for (int64_t i = 1; i < count; ++i) {
                if (pthread_create(&helper, &attributes, call<Work>, const_cast<Work*>(&work)) != 0) break;
                helpers.push_back(helper);
            }
            pthread_attr_destroy(&attributes);
        }
    }
    work();
    for (pthread_t helper : helpers) pthread_join(helper, nullptr);
#else
    std::vector<std::thread> helpers;
    try {
        for (int64_t i = 1; i < count; ++i) helpers.emplace_back([&work] { work(); });
    } catch (...) {
    }
    work();
    for (auto& helper : helpers) helper.join();
#endif
}
