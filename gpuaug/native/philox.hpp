// Philox 4x32-10 (Salmon et al., SC 2011). build.py prepends this file to every C++ file that it builds.

#include <cstdint>

namespace philox {

constexpr int LANES = 16;  // counters per iteration, so that the compiler can vectorise

constexpr uint32_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, W0 = 0x9E3779B9u, W1 = 0xBB67AE85u;

// Ten rounds of Philox: replaces the counters of each lane by four random words. The keys change too.
template <int COUNT = LANES>
inline void rounds(uint32_t* c0, uint32_t* c1, uint32_t* c2, uint32_t* c3, uint32_t* k0, uint32_t* k1) {
    for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < COUNT; ++lane) {
            const uint64_t p0 = static_cast<uint64_t>(c0[lane]) * M0, p1 = static_cast<uint64_t>(c2[lane]) * M1;
            c0[lane] = static_cast<uint32_t>(p1 >> 32) ^ c1[lane] ^ k0[lane];
            c1[lane] = static_cast<uint32_t>(p1);
            c2[lane] = static_cast<uint32_t>(p0 >> 32) ^ c3[lane] ^ k1[lane];
            c3[lane] = static_cast<uint32_t>(p0);
            k0[lane] += W0;
            k1[lane] += W1;
        }
    }
}

}  // namespace philox
