// Philox 4x32-10 (Salmon et al., SC 2011) for a whole batch; bit-identical to the numpy code of `uniforms` in keyed.py.

#include <cstring>

using namespace philox;

// Four uniforms in [0, 1) for every block of every sample, multiples of 2**-24.
//
// keys: two key words and the number of each block, uint32 [3, blocks]; indices: int64 [batch];
// repeats: int64 [batch] or null; out: float32 [batch, blocks, 4].
extern "C" void gpuaug_uniforms(const uint32_t* keys, int64_t blocks, const int64_t* indices, const int64_t* repeats,
                                int64_t batch, uint32_t epoch, float* out) {
    const int64_t all = batch * blocks;
    int64_t sample = 0, block = 0;
    for (int64_t start = 0; start < all; start += LANES) {
        uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0[LANES], k1[LANES];
        const int64_t count = all - start < LANES ? all - start : LANES;
        for (int lane = 0; lane < LANES; ++lane) {  // extra lanes repeat the last counter; their results are dropped
            const uint64_t index = static_cast<uint64_t>(indices[sample]);
            c0[lane] = static_cast<uint32_t>(index);
            c1[lane] = static_cast<uint32_t>(index >> 32);
            c2[lane] = epoch;
            c3[lane] = keys[2 * blocks + block] | (repeats ? static_cast<uint32_t>(repeats[sample]) << 16 : 0u);
            k0[lane] = keys[block];
            k1[lane] = keys[blocks + block];
            if (lane + 1 < count && ++block == blocks) block = 0, ++sample;
        }
        if (++block == blocks) block = 0, ++sample;
        rounds(c0, c1, c2, c3, k0, k1);
        for (int64_t lane = 0; lane < count; ++lane) {
            float* to = out + 4 * (start + lane);
            to[0] = static_cast<float>(c0[lane] >> 8) * 0x1p-24f;  // 24 bits are exact in float32
            to[1] = static_cast<float>(c1[lane] >> 8) * 0x1p-24f;
            to[2] = static_cast<float>(c2[lane] >> 8) * 0x1p-24f;
            to[3] = static_cast<float>(c3[lane] >> 8) * 0x1p-24f;
        }
    }
}

// `field` of keyed.py for CPU tensors, bit-identical: values in (0, 1], from the words of a sample's Philox blocks.
//
// keys: int64 [batch, 2]; out: float32 [batch, count].
extern "C" void gpuaug_field(const int64_t* keys, int64_t batch, int64_t count, int64_t threads, float* out) {
    constexpr int64_t PART = 1 << 14;  // values of a sample that one thread computes at a time
    const int64_t parts = (count + PART - 1) / PART;
    std::atomic<int64_t> next{0};
    on_threads(threads, [&] {
        for (int64_t item = next++; item < batch * parts; item = next++) {
            const int64_t sample = item / parts, first = item % parts * PART, last = first + PART < count ? first + PART : count;
            for (int64_t start = first; start < last; start += 4 * LANES) {
                uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0[LANES], k1[LANES];
                for (int lane = 0; lane < LANES; ++lane) {
                    c0[lane] = static_cast<uint32_t>(start / 4 + lane);
                    c1[lane] = c2[lane] = c3[lane] = 0;
                    k0[lane] = static_cast<uint32_t>(keys[2 * sample]);
                    k1[lane] = static_cast<uint32_t>(keys[2 * sample + 1]);
                }
                rounds(c0, c1, c2, c3, k0, k1);
                float values[4 * LANES];
                for (int lane = 0; lane < LANES; ++lane) {
                    const uint32_t words[4] = {c0[lane], c1[lane], c2[lane], c3[lane]};
                    for (int k = 0; k < 4; ++k) values[4 * lane + k] = (static_cast<float>(words[k] >> 8) + 0.5f) * 0x1p-24f;
                }
                const int64_t here = last - start < 4 * LANES ? last - start : 4 * LANES;
                std::memcpy(out + sample * count + start, values, here * sizeof(float));
            }
        }
    });
}
