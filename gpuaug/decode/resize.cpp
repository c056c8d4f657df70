// Antialiased resizing of regions of uint8 images [h, w, 3], each to its position on a canvas. The results are those of
// torch's upsample_{bilinear,bicubic}2d_aa on uint8, which uses 16-bit weights (UpSampleKernel.cpp, after Pillow-SIMD).
// The columns are resized first and rounded to uint8, then the rows.
//
// Columns with AVX-512 VBMI: one byte permutation collects two neighbouring pixels for each of up to five outputs. So a
// multiply-add uses fifteen of sixteen lanes. With AVX2, it uses six of eight. Other processors use plain loops.
// Intermediate rows are computed when first needed, so they stay in cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PERMUTES 1  // bytes of a register, at once
#else
#define PERMUTES 0
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct Task {
    const uint8_t* src;          // first pixel of the part
    int64_t row, column;         // bytes to the pixel below, and to the pixel on the right; negative if mirrored
    int64_t channel;             // bytes to the next channel
    uint8_t* canvas;             // uint8 [canvas_height, canvas_width, 3], contiguous
    int32_t height, width;       // size of the part
    int32_t to_height, to_width; // size after resizing
    int32_t top, left;           // position of the corner on the canvas; negative: cropped
    int32_t canvas_height, canvas_width;
    int32_t fill, cubic;         // fill: red + 256 green + 65536 blue
};

namespace {

constexpr int LANES = 16, GROUP = 5, WINDOW = 64;  // GROUP: outputs (fifteen lanes); WINDOW: bytes per permutation

void filled(uint8_t* canvas, int64_t pixels, int32_t fill) {
    const uint8_t rgb[3] = {static_cast<uint8_t>(fill), static_cast<uint8_t>(fill >> 8), static_cast<uint8_t>(fill >> 16)};
    if (rgb[0] == rgb[1] && rgb[1] == rgb[2]) {
        std::memset(canvas, rgb[0], pixels * 3);
        return;
    }
    std::memcpy(canvas, rgb, 3);
    for (int64_t done = 1; done < pixels; done *= 2) std::memcpy(canvas + done * 3, canvas, std::min(done, pixels - done) * 3);
}

double weight(double x, bool cubic) {
    x = std::fabs(x);
    if (!cubic) return x < 1.0 ? 1.0 - x : 0.0;
    constexpr double a = -0.5;
    if (x < 1.0) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2.0) return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    return 0.0;
}

// Input pixels and weights of each output along one axis, for outputs first <= i < last.
struct Axis {
    int taps = 0;  // weights per output, an even number
    int precision = 0;
    std::vector<int32_t> start, size;
    std::vector<int16_t> weights;
    std::vector<double> exact;

    void make(int64_t in, int64_t out, bool cubic, int64_t first, int64_t last) {
        const double scale = static_cast<double>(in) / static_cast<double>(out), length = cubic ? 4 : 2;
        const double support = scale >= 1.0 ? length * 0.5 * scale : length * 0.5;
        const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
        const int64_t most = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
        taps = static_cast<int>((most + 1) / 2 * 2);
        start.resize(last - first);
        size.resize(last - first);
        exact.assign((last - first) * taps, 0.0);
        std::vector<double> other(taps);
        double largest = 0.0;
        for (int64_t i = 0; i < out; ++i) {  // all outputs, because the largest weight decides `precision`
            const bool kept = i >= first && i < last;
            double* w = kept ? exact.data() + (i - first) * taps : other.data();
            const double center = scale * (static_cast<double>(i) + 0.5);
            const int64_t begin = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
            const int64_t n = std::clamp<int64_t>(std::min<int64_t>(static_cast<int64_t>(center + support + 0.5), in) - begin, 0, most);
            double total = 0.0;
            for (int64_t j = 0; j < n; ++j) {
                w[j] = weight((static_cast<double>(j + begin) - center + 0.5) * inverse, cubic);
                total += w[j];
            }
            for (int64_t j = 0; j < n; ++j) {
                if (total != 0.0) w[j] /= total;
                largest = std::max(largest, w[j]);
            }
            if (kept) {
                start[i - first] = static_cast<int32_t>(begin);
                size[i - first] = static_cast<int32_t>(n);
            }
        }
        for (precision = 0; precision < 22; ++precision)
            if (static_cast<int>(0.5 + largest * (1 << (precision + 1))) >= (1 << 15)) break;
        weights.resize(exact.size());
        for (size_t k = 0; k < exact.size(); ++k)
            weights[k] = static_cast<int16_t>(static_cast<int>((exact[k] < 0 ? -0.5 : 0.5) + exact[k] * (1 << precision)));
    }
};

#if PERMUTES
struct alignas(64) Pair {  // two neighbouring inputs for each output of a group
    uint8_t index[64];
    int16_t weight[32];
};

struct Group {
    int64_t from, to;  // byte offset in a row of the part, and of the result
    int32_t pairs, first;
};
#endif

// Only grows, because each byte that a vector adds is set to zero.
uint8_t* room(std::vector<uint8_t>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

struct Worker {
    Axis across, down;
    std::vector<uint8_t> rows, upright;
    std::vector<const uint8_t*> lines;
    std::vector<int32_t> both;
#if PERMUTES
    std::vector<Group> groups;
    std::vector<Pair> pairs;
    std::vector<__mmask64> masks;

    void group(int64_t width) {
        groups.clear();
        pairs.clear();
        masks.clear();
        const int count = static_cast<int>(across.start.size());
        for (int i = 0; i < count;) {
            int end = i + 1, size = across.size[i];
            while (end < count && end - i < GROUP && across.start[end] - across.start[i] <= (WINDOW - 6) / 3)
                size = std::max(size, across.size[end++]);
            const int n = std::max(1, (size + 1) / 2);
            groups.push_back({across.start[i] * 3ll, i * 3ll, n, static_cast<int32_t>(pairs.size())});
            for (int t = 0; t < n; ++t) {
                Pair& p = pairs.emplace_back();
                std::memset(&p, 0, sizeof p);
                for (int k = i; k < end; ++k)
                    for (int c = 0; c < 3; ++c) {
                        const int lane = (k - i) * 3 + c, at = (across.start[k] - across.start[i]) * 3 + c;
                        p.index[lane * 4] = static_cast<uint8_t>(at);
                        p.index[lane * 4 + 2] = static_cast<uint8_t>(at + 3);
                        p.weight[lane * 2] = across.weights[static_cast<int64_t>(k) * across.taps + 2 * t];
                        p.weight[lane * 2 + 1] = across.weights[static_cast<int64_t>(k) * across.taps + 2 * t + 1];
                    }
                // never read past the row: a mapped file may end there
                const int64_t there = std::clamp<int64_t>(width * 3 - (groups.back().from + t * 6), 0, WINDOW);
                masks.push_back(there == WINDOW ? ~0ull : (1ull << there) - 1);
            }
            i = end;
        }
    }

    template <int N>
    void columns(const uint8_t* const* in, uint8_t* const* out, int64_t, int64_t ahead) const {
        constexpr __mmask64 low = 0x5555555555555555ull;
        const __m512i half = _mm512_set1_epi32(1 << (across.precision - 1)), zero = _mm512_setzero_si512();
        const __m128i shift = _mm_cvtsi32_si128(across.precision);
        for (const Group& g : groups) {
            __m512i sum[N];
            for (int r = 0; r < N; ++r) {
                sum[r] = half;
                __builtin_prefetch(in[r] + g.from + ahead);  // safe for any address
            }
            for (int t = 0; t < g.pairs; ++t) {
                const Pair& p = pairs[g.first + t];
                const __m512i index = _mm512_load_si512(p.index), w = _mm512_load_si512(p.weight);
                const __mmask64 mask = masks[g.first + t];
                for (int r = 0; r < N; ++r) {
                    const __m512i x = _mm512_maskz_loadu_epi8(mask, in[r] + g.from + t * 6);
                    sum[r] = _mm512_add_epi32(sum[r], _mm512_madd_epi16(_mm512_maskz_permutexvar_epi8(low, index, x), w));
                }
            }
            for (int r = 0; r < N; ++r) {  // the next group overwrites the bytes written past this one
                const __m512i x = _mm512_max_epi32(_mm512_sra_epi32(sum[r], shift), zero);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out[r] + g.to), _mm512_cvtusepi32_epi8(x));
            }
        }
    }
#else
    void group(int64_t) {}

#if defined(__AVX2__)
    // The 8 bytes from `at` on, as far as they are before `end`: a mapped file may end there.
    static __m128i eight(const uint8_t* at, const uint8_t* end) {
        uint64_t bytes = 0;
        if (end - at >= 8) std::memcpy(&bytes, at, 8);
        else if (end > at) std::memcpy(&bytes, at, end - at);
        return _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
    }
#endif

    template <int N>
    void columns(const uint8_t* const* in, uint8_t* const* out, [[maybe_unused]] int64_t width, int64_t) const {
        const int half = 1 << (across.precision - 1);
        const int64_t count = static_cast<int64_t>(across.start.size());
        for (int64_t i = 0; i < count; ++i) {
            const int64_t start = across.start[i] * 3ll;
            const int16_t* w = across.weights.data() + i * across.taps;
#if defined(__AVX2__)
            // two neighbouring pixels, channel by channel: those at byte 0 and those at byte 6
            const __m256i front = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
            const __m256i back = _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
            const __m128i shift = _mm_cvtsi32_si128(across.precision);
            const int taps = across.size[i] + across.size[i] % 2;
            __m256i sum[(N + 1) / 2];  // of two rows each
            for (__m256i& s : sum) s = _mm256_set1_epi32(half);
            const auto add = [&](int t, const __m256i& order, int r, __m128i x, __m128i y) {
                int32_t both;
                std::memcpy(&both, w + t, 4);
                const __m256i pixels = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(x), y, 1), order);
                sum[r / 2] = _mm256_add_epi32(sum[r / 2], _mm256_madd_epi16(pixels, _mm256_set1_epi32(both)));
            };
            int t = 0;
            for (; t + 4 <= taps && start + 3 * t + 16 <= width * 3; t += 4)
                for (int r = 0; r < N; r += 2) {
                    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in[r] + start + 3 * t));
                    const __m128i y = N == 1 ? x : _mm_loadu_si128(reinterpret_cast<const __m128i*>(in[r + (N > 1)] + start + 3 * t));
                    add(t, front, r, x, y);
                    add(t + 2, back, r, x, y);
                }
            for (; t < taps; t += 2)
                for (int r = 0; r < N; r += 2) {
                    const __m128i x = eight(in[r] + start + 3 * t, in[r] + width * 3);
                    add(t, front, r, x, N == 1 ? x : eight(in[r + (N > 1)] + start + 3 * t, in[r + (N > 1)] + width * 3));
                }
            for (int r = 0; r < N; ++r) {  // the next output overwrites the fourth byte
                const __m128i x = r % 2 ? _mm256_extracti128_si256(sum[r / 2], 1) : _mm256_castsi256_si128(sum[r / 2]);
                const __m128i words = _mm_packs_epi32(_mm_sra_epi32(x, shift), _mm_setzero_si128());
                const int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
                std::memcpy(out[r] + 3 * i, &bytes, 4);
            }
#else
            for (int r = 0; r < N; ++r)
                for (int c = 0; c < 3; ++c) {
                    int sum = half;
                    for (int t = 0; t < across.size[i]; ++t) sum += in[r][start + 3 * t + c] * w[t];
                    out[r][3 * i + c] = static_cast<uint8_t>(std::clamp(sum >> across.precision, 0, 255));
                }
#endif
        }
    }
#endif

    // Computes one row of the result from `n` pairs of rows, with a pair of weights for each pair of rows.
    static void mixed(const uint8_t* const* from, const int32_t* weights, int n, int precision, uint8_t* to, int64_t bytes) {
#if PERMUTES
        const __m512i zero = _mm512_setzero_si512(), half = _mm512_set1_epi32(1 << (precision - 1));
        const __m128i shift = _mm_cvtsi32_si128(precision);
        for (int64_t at = 0; at < bytes; at += 64) {
            __m512i a = half, b = half, c = half, d = half;
            for (int t = 0; t < n; ++t) {
                const __m512i x = _mm512_loadu_si512(from[2 * t] + at), y = _mm512_loadu_si512(from[2 * t + 1] + at);
                const __m512i w = _mm512_set1_epi32(weights[t]);
                const __m512i low = _mm512_unpacklo_epi8(x, y), high = _mm512_unpackhi_epi8(x, y);
                a = _mm512_add_epi32(a, _mm512_madd_epi16(_mm512_unpacklo_epi8(low, zero), w));
                b = _mm512_add_epi32(b, _mm512_madd_epi16(_mm512_unpackhi_epi8(low, zero), w));
                c = _mm512_add_epi32(c, _mm512_madd_epi16(_mm512_unpacklo_epi8(high, zero), w));
                d = _mm512_add_epi32(d, _mm512_madd_epi16(_mm512_unpackhi_epi8(high, zero), w));
            }
            a = _mm512_packs_epi32(_mm512_sra_epi32(a, shift), _mm512_sra_epi32(b, shift));
            c = _mm512_packs_epi32(_mm512_sra_epi32(c, shift), _mm512_sra_epi32(d, shift));
            const __m512i done = _mm512_packus_epi16(a, c);
            if (bytes - at >= 64) _mm512_storeu_si512(to + at, done);
            else _mm512_mask_storeu_epi8(to + at, (1ull << (bytes - at)) - 1, done);
        }
#else
        const int half = 1 << (precision - 1);
        int64_t at = 0;
#if defined(__AVX2__)
        const __m256i zero = _mm256_setzero_si256(), start = _mm256_set1_epi32(half);
        const __m128i shift = _mm_cvtsi32_si128(precision);
        for (; at + 32 <= bytes; at += 32) {
            __m256i a = start, b = start, c = start, d = start;
            for (int t = 0; t < n; ++t) {
                const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[2 * t] + at));
                const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[2 * t + 1] + at));
                const __m256i w = _mm256_set1_epi32(weights[t]);
                const __m256i low = _mm256_unpacklo_epi8(x, y), high = _mm256_unpackhi_epi8(x, y);
                a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), w));
                b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), w));
                c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), w));
                d = _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), w));
            }
            a = _mm256_packs_epi32(_mm256_sra_epi32(a, shift), _mm256_sra_epi32(b, shift));
            c = _mm256_packs_epi32(_mm256_sra_epi32(c, shift), _mm256_sra_epi32(d, shift));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), _mm256_packus_epi16(a, c));
        }
#endif
        for (constexpr int64_t BLOCK = 16; at < bytes; at += BLOCK) {  // rows have room to be read past their end
            int sum[BLOCK];
            std::fill(sum, sum + BLOCK, half);
            for (int t = 0; t < n; ++t) {
                const uint8_t *x = from[2 * t] + at, *y = from[2 * t + 1] + at;
                const int first = static_cast<int16_t>(weights[t]), second = weights[t] >> 16;
                for (int64_t i = 0; i < BLOCK; ++i) sum[i] += x[i] * first + y[i] * second;
            }
            for (int64_t i = 0; i < std::min(BLOCK, bytes - at); ++i) to[at + i] = static_cast<uint8_t>(std::clamp(sum[i] >> precision, 0, 255));
        }
#endif
    }

    void run(const Task& task, uint8_t* canvas) {
        const int64_t H = task.canvas_height, W = task.canvas_width;
        const int64_t y0 = std::clamp<int64_t>(task.top, 0, H), y1 = std::clamp<int64_t>(static_cast<int64_t>(task.top) + task.to_height, y0, H);
        const int64_t x0 = std::clamp<int64_t>(task.left, 0, W), x1 = std::clamp<int64_t>(static_cast<int64_t>(task.left) + task.to_width, x0, W);
        if (y0 > 0 || x0 > 0 || y1 < H || x1 < W) filled(canvas, H * W, task.fill);
        if (y0 == y1 || x0 == x1) return;
        const uint8_t* src = task.src;
        int64_t pitch = task.row;
        const int64_t h = task.height, w = task.width;
        if (task.column != 3 || task.channel != 1) {
            uint8_t* __restrict o = room(upright, h * w * 3);
            for (int64_t y = 0; y < h; ++y, o += w * 3) {
                const uint8_t *r = src + y * task.row, *g = r + task.channel, *b = g + task.channel;
                if (task.column == 1)  // planes: the compiler vectorises this loop
                    for (int64_t x = 0; x < w; ++x) o[3 * x] = r[x], o[3 * x + 1] = g[x], o[3 * x + 2] = b[x];
                else
                    for (int64_t x = 0, at = 0; x < w; ++x, at += task.column) o[3 * x] = r[at], o[3 * x + 1] = g[at], o[3 * x + 2] = b[at];
            }
            src = upright.data();
            pitch = w * 3;
        }
        const int64_t from_y = y0 - task.top, from_x = x0 - task.left, high = y1 - y0, wide = x1 - x0;
        uint8_t* const out = canvas + (y0 * W + x0) * 3;
        const bool same_width = w == task.to_width, same_height = h == task.to_height;
        if (same_width && same_height) {
            for (int64_t y = 0; y < high; ++y) std::memcpy(out + y * W * 3, src + (from_y + y) * pitch + from_x * 3, wide * 3);
            return;
        }
        if (!same_width) {
            across.make(w, task.to_width, task.cubic, from_x, from_x + wide);
            group(w);
        }
        down.make(h, task.to_height, task.cubic, from_y, from_y + high);
        const int64_t stride = (wide * 3 + 2 * WINDOW - 1) / WINDOW * WINDOW;  // room for reads and writes past the row
        room(rows, h * stride);
        int64_t made = down.start[0];
        lines.resize(down.taps);
        both.resize(down.taps / 2);
        for (int64_t y = 0; y < high; ++y) {
            const int64_t start = down.start[y], end = start + down.size[y];
            if (same_width) {
                for (; made < end; ++made) std::memcpy(rows.data() + made * stride, src + made * pitch + from_x * 3, wide * 3);
            } else {
                made = std::max(made, start);
                while (made < end) {
                    const uint8_t* in[4];
                    uint8_t* to[4];
                    const int64_t n = h - made >= 4 ? 4 : 1;
                    for (int64_t r = 0; r < n; ++r) in[r] = src + (made + r) * pitch, to[r] = rows.data() + (made + r) * stride;
                    if (n == 4) columns<4>(in, to, w, 4 * pitch);
                    else columns<1>(in, to, w, pitch);
                    made += n;
                }
            }
            const int n = std::max(1, (down.size[y] + 1) / 2);
            const int16_t* weights = down.weights.data() + y * down.taps;
            for (int t = 0; t < n; ++t) {
                lines[2 * t] = rows.data() + std::min(start + 2 * t, h - 1) * stride;
                lines[2 * t + 1] = rows.data() + std::clamp<int64_t>(start + 2 * t + 1, 0, end - 1) * stride;
                both[t] = static_cast<uint16_t>(weights[2 * t]) | static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(weights[2 * t + 1])) << 16);
            }
            mixed(lines.data(), both.data(), n, down.precision, out + y * W * 3, wide * 3);
        }
    }
};

}  // namespace

// Returns 1 if memory runs out.
extern "C" int gpuaug_resize(const Task* tasks, int64_t count, int32_t threads) {
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    auto work = [&] {
        try {
            Worker worker;
            for (int64_t i = next++; i < count; i = next++) worker.run(tasks[i], tasks[i].canvas);
        } catch (...) {  // only std::bad_alloc is possible
            failed = 1;
        }
    };
    on_threads(std::min<int64_t>(threads, count), work);
    return failed;
}

// Does one task on another canvas. cpu.cpp calls this for each of its images; a thread keeps its memory until it ends.
extern "C" int gpuaug_resize_one(const Task* tasks, int64_t number, uint8_t* canvas) {
    thread_local Worker worker;
    try {
        worker.run(tasks[number], canvas);
        return 0;
    } catch (...) {
        return 1;
    }
}
