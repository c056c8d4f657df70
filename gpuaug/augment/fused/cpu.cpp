// Augments a batch of images on the CPU. Each image runs its own program (backend.py) while it stays in the cache.
//
// The formulas have Kornia's order of additions and Kornia's fused multiply-adds. So most pixels are bit-identical to
// those of Kornia 0.9, and discontinuous operations (equalize, posterize) jump at the same pixels. Steps with Pillow's
// arithmetic (ops/pillow.py) are bit-identical to Pillow's. These equalities need the compiler flag -ffp-contract=off.
// With -ffinite-math-only, a NaN can become any integer. So an index that comes from a float is clamped as an integer.
// An image is float planes, in groups of three: a group has the channels of RGB, or three channels of another image.
// Consecutive pointwise operations run on blocks that fit into the L1 cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int BLOCK = 512;   // pixels: three planes of 2 KB stay in the L1 cache
constexpr int LANES = 16;

struct Images {
    const void* data;
    int64_t height, width;
    int64_t apart[4];        // elements from image to image, channel to channel, row to row, pixel to pixel
    float white;             // the value that becomes 1
    int32_t type;            // 0: float32, 1: bfloat16, 2: float16, 3: uint8, 4: uint16
};

struct Job {
    Images from;
    void* dst;               // [B, C, H, W], or [B, H, W, C] if channels_last
    const int32_t* code;     // [B, S]
    const float* args;       // [B, S, ARGS]
    const float* const* tables;  // [B, S]: for the codes that need more than ARGS numbers, else null
    const float* ramps;          // WARP: output positions [2, 2, W + H]: affine or projective, align_corners, x and y
    const float *scale, *shift;  // [C]: out = x * scale + shift
    int64_t batch, channels, height, width, steps;
    int32_t dst_type;        // 0: float32, 1: bfloat16, 2: float16
    int32_t channels_last;
    int32_t threads;
    int32_t refuses;         // whether values that are not finite are an error
    const struct Crop* crop; // cut out first, one image at a time; null: none
};

enum { NO_MEMORY = 1, NOT_FINITE = 2 };  // what gpuaug_augment returns; 0: done

inline float low(float a, float b) { return a < b ? a : b; }
inline float high(float a, float b) { return a > b ? a : b; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float luma(float r, float g, float b, float wr, float wg, float wb) { return fma(b, wb, fma(g, wg, r * wr)); }
inline float unit(float x) { return low(high(x, 0.0f), 1.0f); }

// level / 255, correctly rounded without a division.
constexpr float BYTE_HIGH = 1.0f / 255.0f, BYTE_LOW = static_cast<float>(1.0 / 255.0 - static_cast<double>(1.0f / 255.0f));
inline float value(float level) { return fma(level, BYTE_HIGH, level * BYTE_LOW); }
inline float byte_value(int k) { return value(static_cast<float>(k)); }

// 2 ** (gamma * log2(x)) with a relative error below 1e-6 on (0, 1]. Compilers can vectorise it, unlike powf.
inline float power(float x, float gamma) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // mantissa in [sqrt(1/2), sqrt(2))
    const int32_t scaled = bits - exponent * (1 << 23);
    float m;
    std::memcpy(&m, &scaled, 4);
    const float t = (m - 1.0f) / (m + 1.0f), t2 = t * t;  // log(m) = 2 atanh(t)
    const float series = t * t2 * (0.66666667f + t2 * (0.4f + t2 * (0.28571429f + t2 * 0.22222222f)));
    const float lead = 2.0f * t;
    const float log2_fraction = 1.44269504f * lead + 1.44269504f * series;
    // the exponent is multiplied separately, so that the fraction keeps all its bits
    const float whole = gamma * static_cast<float>(exponent);
    const float rounded = __builtin_floorf(whole + gamma * log2_fraction + 0.5f);
    const float f = (whole - rounded) + gamma * log2_fraction;
    const float e = 1.0f + f * (0.69314718f + f * (0.24022651f + f * (0.05550411f + f * (0.00961813f + f * (0.00133336f + f * 0.00015403f)))));
    const int32_t power_of_two = (static_cast<int32_t>(high(low(rounded, 127.0f), -126.0f)) + 127) << 23;
    float two;
    std::memcpy(&two, &power_of_two, 4);
    const float y = rounded < -126.0f ? 0.0f : e * two;
    return x <= 0.0f ? (gamma == 0.0f ? 1.0f : 0.0f) : y;
}

bool computes_levels(int32_t code, const float* a) {  // whether the step has Pillow's arithmetic
    return has(code, IS_PILLOW) ? a[PILLOW_FLAG] != 0.0f : code == LEVELS || code == RESAMPLE;
}

struct Op {
    int32_t code;
    const float* a;
    const float* table;
    bool pillow = computes_levels(code, a);
};

// Levels 0..255 of pixels in 0..1, in the order of ops/pillow.py.
inline float level(float x) { return __builtin_floorf(x * 255.0f + 0.5f); }
inline float gray_level(float r, float g, float b) {  // exact: sums stay below 2^24
    return __builtin_floorf((r * 19595.0f + g * 38470.0f + b * 7471.0f + 32768.0f) * (1.0f / 65536.0f));
}
inline float blended(float start, float v, float f) { return __builtin_floorf(low(high(start + f * (v - start), 0.0f), 255.0f)); }

struct Statistic {  // of an image, before one operation of its program
    double gray = 0.0;
    float minimum[3], maximum[3];
    // four histograms per channel, because neighbours are often equal, and adding twice to one counter is slow
    std::vector<uint32_t> histogram = std::vector<uint32_t>(3 * 4 * 256);
    std::vector<float> table = std::vector<float>(3 * 256);
    bool flat[3] = {false, false, false};  // equalize does not change a flat channel

    void reset(int32_t code) {
        gray = 0.0;
        std::fill(minimum, minimum + 3, INFINITY);
        std::fill(maximum, maximum + 3, -INFINITY);
        if (code == EQUALIZE) std::fill(histogram.begin(), histogram.end(), 0u);
    }
};

bool keeps_outside(const Op& op) { return has(op.code, IS_OUTSIDE) && !op.pillow; }
bool may_leave_unit(const Op& op, bool outside) {
    switch (op.code) {
        case NOISE: case ERASE_NOISE: return true;
        case INVERT: return outside || op.a[0] != 1.0f;
        case ERASE: return outside || op.a[4] < 0.0f || op.a[4] > 1.0f;
        case GRAY: return outside || op.a[3] != 0.0f;
        case AUTOCONTRAST: return false;
        default: return outside && keeps_outside(op);
    }
}

struct Block {  // position of a block in its image: `rows` whole rows, or a part of one row
    int64_t y, x, rows, width;
};

// Replaces each value x of channel c at pixel i by f(x, c, i). Inlined, so each call becomes a vectorised loop of its own.
template <typename F>
inline void map_plane(float* __restrict p, int n, int c, F f) {
    for (int i = 0; i < n; ++i) p[i] = f(p[i], c, i);
}
template <typename F>
inline void map_values(float* const* planes, int n, F f) {
    for (int c = 0; c < 3; ++c) map_plane(planes[c], n, c, f);
}

// Calls f(r, g, b) with the colours of each pixel, which f changes.
template <typename F>
inline void map_colors(float* __restrict r, float* __restrict g, float* __restrict b, int n, F f) {
    for (int i = 0; i < n; ++i) f(r[i], g[i], b[i]);
}
template <typename F>
inline void map_pixels(float* const* planes, int n, F f) {
    map_colors(planes[0], planes[1], planes[2], n, f);
}

void clamp_block(float* __restrict p, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = unit(p[i]);
}

// Has one division, not five as in Kornia; results differ by at most 1e-6. Colours stay in 0..1: delta <= top <= 1.
void hue(float turns, float* const* planes, int n) {
    const float turn = turns * 6.0f;
    map_pixels(planes, n, [=](float& r, float& g, float& b) {
        const float top = high(high(r, g), b), bottom = low(low(r, g), b), delta = top - bottom;
        const bool red = (r >= g) & (r >= b), green = g >= b;
        const float difference = red ? g - b : (green ? b - r : r - g), base = red ? 0.0f : (green ? 2.0f : 4.0f);
        float h = difference / (delta == 0.0f ? 1.0f : delta) + base + turn;
        h = fma(-6.0f, __builtin_floorf(h * (1.0f / 6.0f)), h);
        r = fma(-delta, unit(2.0f - __builtin_fabsf(h - 3.0f)), top);
        g = fma(-delta, unit(__builtin_fabsf(h - 2.0f) - 1.0f), top);
        b = fma(-delta, unit(__builtin_fabsf(h - 4.0f) - 1.0f), top);
    });
}

// Selects by bit masks, because compilers turn nested conditional expressions into jumps before they vectorise.
inline float pick(bool condition, float a, float b) {
    int32_t x, y;
    std::memcpy(&x, &a, 4);
    std::memcpy(&y, &b, 4);
    const int32_t mask = -static_cast<int32_t>(condition), z = (x & mask) | (y & ~mask);
    float out;
    std::memcpy(&out, &z, 4);
    return out;
}

// The steps with Pillow's arithmetic that have no table.
void pointwise_levels(const Op& op, const Statistic& stat, float* const* planes, int n, int64_t pixels) {
    const float* a = op.a;
    const float f = a[0];
    switch (op.code) {
        case SATURATION:
            return map_pixels(planes, n, [=](float& r, float& g, float& b) {
                const float x = level(r), y = level(g), z = level(b), gray = gray_level(x, y, z);
                r = value(blended(gray, x, f));
                g = value(blended(gray, y, f));
                b = value(blended(gray, z, f));
            });
        case LEVELS:
            return map_values(planes, n, [=](float x, int, int) { return value(__builtin_floorf(x * 255.0f + f)); });
        case MULTIPLY: case CONTRAST: {
            const int64_t sum = static_cast<int64_t>(stat.gray);
            const float start = op.code == CONTRAST ? static_cast<float>((2 * sum + pixels) / (2 * pixels)) : 0.0f;
            return map_values(planes, n, [=](float x, int, int) { return value(blended(start, level(x), f)); });
        }
        case POSTERIZE: {
            const int bits = std::min(std::max(static_cast<int>(f), 0), 8), mask = (0xff << (8 - bits)) & 0xff;
            return map_values(planes, n, [=](float x, int, int) { return byte_value(static_cast<int>(level(x)) & mask); });
        }
        default: {  // SOLARIZE
            const float add = a[1], sign = a[2] != 0.0f ? 1.0f : -1.0f, top = a[2] != 0.0f ? 0.0f : 255.0f;
            return map_values(planes, n, [=](float x, int, int) {
                const float v = level(x);
                return value(v < f ? __builtin_floorf(low(high(v + add, 0.0f), 255.0f)) : top + sign * v);
            });
        }
    }
}

// Computes the hue exactly as Kornia, for a discontinuous operation that comes later: values k / 255 can stay k / 255.
void hue_exact(float turns, float* const* planes, int n) {
    const float circle = 6.283185307179586f, turn = turns * 2.0f * 3.141592653589793f;
    map_pixels(planes, n, [=](float& x, float& y, float& z) {
        const float v = high(high(x, y), z), bottom = low(low(x, y), z), delta = v - bottom;
        const float s = delta / (v == 0.0f ? 1.0f : v + 1e-8f), divisor = delta == 0.0f ? 1.0f : delta;
        const float rc = v - x, gc = v - y, bc = v - z;
        const bool red = (x >= y) & (x >= z), green = y >= z;
        float h = pick(red, bc - gc, pick(green, (rc - bc) + 2.0f * divisor, (gc - rc) + 4.0f * divisor));
        h = h / divisor / 6.0f;
        h = h - __builtin_truncf(h);
        h = h < 0.0f ? h + 1.0f : h;
        h = circle * h;
        h = h >= circle ? 0.0f : h;
        h += turn;
        h = h >= circle ? h - circle : (h <= -circle ? h + circle : h);
        h = h < 0.0f ? h + circle : h;
        h = h >= circle ? 0.0f : h;
        h = h / circle * 6.0f;
        const float sextant = __builtin_floorf(h), hi = sextant >= 6.0f ? sextant - 6.0f : sextant;
        const float f = (h >= 6.0f ? h - 6.0f : h) - hi;
        const float p = v * (1.0f - s), q = v * (1.0f - f * s), t = v * (1.0f - (1.0f - f) * s);
        const bool m0 = hi == 0.0f, m1 = hi == 1.0f, m2 = hi == 2.0f, m3 = hi == 3.0f, m4 = hi == 4.0f;
        x = unit(pick(m1, q, pick(m2 | m3, p, pick(m4, t, v))));
        y = unit(pick(m0, t, pick(m1 | m2, v, pick(m3, q, p))));
        z = unit(pick(m0 | m1, p, pick(m2, t, pick(m3 | m4, v, q))));
    });
}

// `some`: number of planes; tables have no values for others.
void pointwise(const Op& op, const Statistic& stat, float* const* planes, int n, const Block& at, int64_t pixels, int64_t image_width,
               bool exact, int some) {
    const float *const a = op.a, f = a[0], *const table = op.table ? op.table + at.y * image_width + at.x : nullptr;
    const bool levels = op.pillow;
    if (levels && op.code != AUTOCONTRAST && op.code != EQUALIZE) return pointwise_levels(op, stat, planes, n, pixels);
    switch (levels ? EQUALIZE : op.code) {  // AUTOCONTRAST and EQUALIZE of Pillow use a table
        case MULTIPLY:
            for (int c = 0; c < 3; ++c) map_plane(planes[c], n, c, [k = a[c]](float x, int, int) { return unit(x * k); });
            return;
        case ADD:
            for (int c = 0; c < 3; ++c) map_plane(planes[c], n, c, [k = a[c]](float x, int, int) { return unit(x + k); });
            return;
        case CONTRAST: {
            const float add = static_cast<float>(stat.gray / static_cast<double>(pixels)) * (1.0f - f);
            return map_values(planes, n, [=](float x, int, int) { return unit(x * f + add); });
        }
        case SATURATION:
            return map_pixels(planes, n, [=](float& r, float& g, float& b) {
                const float gray = (1.0f - f) * luma(r, g, b, 0.299f, 0.587f, 0.114f);
                r = unit(gray + f * r);
                g = unit(gray + f * g);
                b = unit(gray + f * b);
            });
        case SATURATION_HSV:
            return map_pixels(planes, n, [=](float& r, float& g, float& b) {
                const float top = high(high(r, g), b), bottom = low(low(r, g), b), delta = top - bottom;
                const float adjusted = top * unit(delta / (top == 0.0f ? 1.0f : top + 1e-8f) * f);
                const float ratio = adjusted / (delta == 0.0f ? 1.0f : delta), base = top - adjusted;
                r = unit((r - bottom) * ratio + base);
                g = unit((g - bottom) * ratio + base);
                b = unit((b - bottom) * ratio + base);
            });
        case HUE: return exact ? hue_exact(f, planes, n) : hue(f, planes, n);
        case GRAY: {
            const float red = a[0], green = a[1], blue = a[2];
            return map_pixels(planes, n, [=](float& r, float& g, float& b) { r = g = b = luma(r, g, b, red, green, blue); });
        }
        case SOLARIZE: {
            const float add = a[1];
            return map_values(planes, n, [=](float x, int, int) {
                const float z = unit(x + add);
                return z < f ? z : 1.0f - z;
            });
        }
        case POSTERIZE: {
            const int bits = static_cast<int>(f), mask = bits <= 0 ? 0 : (0xff << (8 - bits)) & 0xff;
            if (bits >= 8) return;
            return map_values(planes, n, [=](float x, int, int) { return byte_value(static_cast<int>(x * 255.0f) & mask); });
        }
        case INVERT: return map_values(planes, n, [=](float x, int, int) { return f - x; });
        case GAMMA: {
            const float gain = a[1];
            return map_values(planes, n, [=](float x, int, int) { return unit(gain * power(x, f)); });
        }
        case SHUFFLE: {
            float copy[3][BLOCK];
            for (int c = 0; c < 3; ++c) std::memcpy(copy[c], planes[c], n * sizeof(float));
            for (int c = 0; c < 3; ++c) std::memcpy(planes[c], copy[static_cast<int>(a[c])], n * sizeof(float));
            return;
        }
        case ERASE: case ERASE_NOISE: {  // the value, or a colour and the std of noise
            const int64_t x0 = static_cast<int64_t>(a[0]), y0 = static_cast<int64_t>(a[1]);
            const int64_t wide = static_cast<int64_t>(a[2]), tall = static_cast<int64_t>(a[3]);
            const int64_t from = std::max<int64_t>(x0 - at.x, 0), to = std::min<int64_t>(x0 + wide - at.x, at.width);
            for (int64_t row = 0; row < at.rows; ++row) {
                const int64_t y = at.y + row - y0;  // in the box
                if (y < 0 || y >= tall) continue;
                for (int c = 0; c < some; ++c) {
                    float* __restrict p = planes[c] + row * at.width;
                    const float color = op.code == ERASE ? a[4] : a[4 + c];
                    const float* __restrict noise = op.table ? op.table + (c * tall + y) * wide + at.x - x0 : nullptr;
                    for (int64_t i = from; i < to; ++i) p[i] = noise ? color + a[7 + c] * noise[i] : color;
                }
            }
            return;
        }
        case NOISE:
            for (int c = 0; c < some; ++c) map_plane(planes[c], n, c, [k = table + c * pixels](float x, int, int i) { return x + k[i]; });
            return;
        case AUTOCONTRAST: {
            float least[3], range[3];
            for (int c = 0; c < 3; ++c) least[c] = stat.minimum[c], range[c] = stat.maximum[c] - stat.minimum[c] + 1e-6f;
            if (f != 0.0f) return map_values(planes, n, [&](float x, int c, int) { return unit((x - least[c]) / range[c]); });
            return map_values(planes, n, [&](float x, int c, int) { return (x - least[c]) / range[c]; });
        }
        case EQUALIZE:
            for (int c = 0; c < 3; ++c) {
                float* __restrict p = planes[c];
                if (stat.flat[c] && levels)
                    for (int i = 0; i < n; ++i) p[i] = value(level(p[i]));
                if (stat.flat[c]) continue;
                const float* __restrict to = stat.table.data() + c * 256;
                const float half = levels ? 0.5f : 0.0f;
                int i = 0;
#if defined(__AVX512F__)
                for (; i + 16 <= n; i += 16) {
                    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(p + i), _mm512_set1_ps(255.0f));
                    const __m512i at_value = _mm512_cvttps_epi32(_mm512_add_ps(scaled, _mm512_set1_ps(half)));
                    _mm512_storeu_ps(p + i, _mm512_i32gather_ps(_mm512_and_si512(at_value, _mm512_set1_epi32(255)), to, 4));
                }
#endif
                for (; i < n; ++i) p[i] = to[static_cast<int>(p[i] * 255.0f + half) & 255];
            }
            return;
        default: return;
    }
}

// `some`: number of the planes to look at; 3 of RGB.
void collect(const Op& op, Statistic& stat, const float* const* planes, int n, bool rgb, int some) {
    const float *__restrict r = planes[0], *__restrict g = planes[1], *__restrict b = planes[2];
    const int32_t code = op.code;
    const float half = op.pillow ? 0.5f : 0.0f;
    if (code == CONTRAST && op.pillow) {
        float sum = 0.0f;  // exact, because a block is small
        for (int i = 0; i < n; ++i) sum += gray_level(level(r[i]), level(g[i]), level(b[i]));
        stat.gray += sum;
    } else if (code == CONTRAST && !rgb) {
        for (int c = 0; c < some; ++c) {
            double sum = 0.0;
            for (int i = 0; i < n; ++i) sum += planes[c][i];
            stat.gray += sum;
        }
    } else if (code == CONTRAST) {
        float sum[LANES] = {};
        int i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int l = 0; l < LANES; ++l) sum[l] += luma(r[i + l], g[i + l], b[i + l], 0.299f, 0.587f, 0.114f);
        for (; i < n; ++i) sum[0] += luma(r[i], g[i], b[i], 0.299f, 0.587f, 0.114f);
        double total = 0.0;
        for (float s : sum) total += s;
        stat.gray += total;
    } else if (code == AUTOCONTRAST) {
        for (int c = 0; c < 3; ++c) {
            const float* __restrict p = planes[c];
            float smallest[LANES], largest[LANES];
            for (int l = 0; l < LANES; ++l) smallest[l] = stat.minimum[c], largest[l] = stat.maximum[c];
            int i = 0;
            for (; i + LANES <= n; i += LANES)
                for (int l = 0; l < LANES; ++l) smallest[l] = low(smallest[l], p[i + l]), largest[l] = high(largest[l], p[i + l]);
            for (; i < n; ++i) smallest[0] = low(smallest[0], p[i]), largest[0] = high(largest[0], p[i]);
            for (int l = 0; l < LANES; ++l) stat.minimum[c] = low(stat.minimum[c], smallest[l]), stat.maximum[c] = high(stat.maximum[c], largest[l]);
        }
    } else if (code == EQUALIZE) {
        int32_t index[BLOCK];
        for (int c = 0; c < 3; ++c) {
            const float* __restrict p = planes[c];
            uint32_t* count = stat.histogram.data() + c * 4 * 256;
            for (int i = 0; i < n; ++i) index[i] = static_cast<int32_t>(p[i] * 255.0f + half) & 255;
            for (int i = 0; i < n; ++i) ++count[(i & 3) * 256 + index[i]];
        }
    }
}

void finish(const Op& op, Statistic& stat, int64_t pixels) {
    if (op.code == AUTOCONTRAST && op.pillow)
        for (int c = 0; c < 3; ++c) {
            const double bottom = level(stat.minimum[c]), top = level(stat.maximum[c]);
            stat.flat[c] = top <= bottom;
            if (stat.flat[c]) continue;
            const double scale = 255.0 / (top - bottom), shift = -bottom * scale;
            for (int k = 0; k < 256; ++k) {
                const double v = std::floor(std::min(std::max(k * scale + shift, 0.0), 255.0));
                stat.table[c * 256 + k] = value(static_cast<float>(v));
            }
        }
    if (op.code != EQUALIZE) return;
    for (int c = 0; c < 3; ++c) {
        uint32_t* count = stat.histogram.data() + c * 4 * 256;
        for (int k = 0; k < 256; ++k) count[k] += count[256 + k] + count[512 + k] + count[768 + k];
        int last = 255;
        while (last > 0 && count[last] == 0) --last;
        const int64_t step = (pixels - count[last]) / 255;
        stat.flat[c] = step == 0;
        if (step == 0) continue;
        int64_t sum = step / 2;
        for (int k = 0; k < 256; ++k) {  // shifted by one, as in Pillow's table
            stat.table[c * 256 + k] = k == 0 ? 0.0f : static_cast<float>(std::min<int64_t>(sum / step, 255)) / 255.0f;
            sum += count[k];
        }
    }
}

// uint8 [n, 3] to three planes; MIRRORED: in reverse order. Without intrinsics this is three times slower.
template <bool MIRRORED>
void load_bytes(const uint8_t* __restrict s, float* __restrict r, float* __restrict g, float* __restrict b, int n) {
    int i = 0;
#if defined(__AVX512VBMI__)
    float* const planes[3] = {r, g, b};
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i three = _mm512_set1_epi32(3), last = _mm512_set1_epi32(15);
    const __m512i red = _mm512_mullo_epi32(MIRRORED ? _mm512_sub_epi32(last, lane) : lane, three);
    for (; i + 16 <= n; i += 16) {
        const __m512i bytes = _mm512_maskz_loadu_epi8((uint64_t{1} << 48) - 1, s + 3 * (MIRRORED ? n - 16 - i : i));
        for (int c = 0; c < 3; ++c) {  // move each byte to the low end of a lane
            const __m512i from = _mm512_add_epi32(red, _mm512_set1_epi32(c));
            const __m512 x = _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x1111111111111111u, from, bytes));
            const __m512 low_part = _mm512_mul_ps(x, _mm512_set1_ps(BYTE_LOW));
            _mm512_storeu_ps(planes[c] + i, _mm512_fmadd_ps(x, _mm512_set1_ps(BYTE_HIGH), low_part));
        }
    }
#elif defined(__AVX2__) && defined(__FMA__)
    float* const planes[3] = {r, g, b};
    for (; i + 8 <= n; i += 8) {
        const uint8_t* p = s + 3 * (MIRRORED ? n - 8 - i : i);
        const __m128i front = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));  // pixels 0..3 at bytes 0..11
        const __m128i back = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));  // pixels 4..7 at bytes 4..15
        const __m256i bytes = MIRRORED ? _mm256_set_m128i(front, back) : _mm256_set_m128i(back, front);
        const int z = static_cast<int>(0xffffff00u);  // three zero bytes above each value
        const __m256i red = MIRRORED ? _mm256_setr_epi32(z | 13, z | 10, z | 7, z | 4, z | 9, z | 6, z | 3, z)
                                     : _mm256_setr_epi32(z, z | 3, z | 6, z | 9, z | 4, z | 7, z | 10, z | 13);
        for (int c = 0; c < 3; ++c) {
            const __m256i from = _mm256_add_epi32(red, _mm256_set1_epi32(c));
            const __m256 x = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, from));
            const __m256 low_part = _mm256_mul_ps(x, _mm256_set1_ps(BYTE_LOW));
            _mm256_storeu_ps(planes[c] + i, _mm256_fmadd_ps(x, _mm256_set1_ps(BYTE_HIGH), low_part));
        }
    }
#endif
    for (; i < n; ++i) {
        const uint8_t* p = s + 3 * (MIRRORED ? n - 1 - i : i);
        r[i] = byte_value(p[0]);
        g[i] = byte_value(p[1]);
        b[i] = byte_value(p[2]);
    }
}

inline float from_bfloat(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float from_half(uint16_t x) {
    _Float16 half;
    std::memcpy(&half, &x, 2);
    return static_cast<float>(half);
}

// Reads n values that lie `step` apart as fractions of white.
template <typename T, typename F>
inline void load_values(const T* __restrict s, int64_t step, float* __restrict d, int64_t n, F convert) {
    if (step == 1)
        for (int64_t i = 0; i < n; ++i) d[i] = convert(s[i]);
    else if (step == -1)  // a flip; compilers vectorise both loops
        for (int64_t i = 0; i < n; ++i) d[i] = convert(s[-i]);
    else
        for (int64_t i = 0; i < n; ++i) d[i] = convert(s[i * step]);
}
void load_values(const void* src, int32_t type, int64_t at, int64_t step, float white, float* d, int64_t n) {
    const uint16_t* const shorts = static_cast<const uint16_t*>(src) + at;
    switch (type) {
        case 0: {
            const float* const s = static_cast<const float*>(src) + at;
            if (white == 1.0f) return load_values(s, step, d, n, [](float x) { return x; });
            return load_values(s, step, d, n, [=](float x) { return x / white; });
        }
        case 1: return load_values(shorts, step, d, n, [=](uint16_t x) { return from_bfloat(x) / white; });
        case 2: return load_values(shorts, step, d, n, [=](uint16_t x) { return from_half(x) / white; });
        case 3: {
            const uint8_t* const s = static_cast<const uint8_t*>(src) + at;
            if (white == 255.0f) return load_values(s, step, d, n, [](uint8_t x) { return byte_value(x); });
            return load_values(s, step, d, n, [=](uint8_t x) { return static_cast<float>(x) / white; });
        }
        default: return load_values(shorts, step, d, n, [=](uint16_t x) { return static_cast<float>(x) / white; });
    }
}

// Whether all n values have a bit of the exponent that is 0. -ffinite-math-only allows no test of floats.
template <typename T>
bool is_finite(const T* __restrict s, int64_t step, int64_t n, T exponent) {
    T found = 0;
    if (step == 1)
        for (int64_t i = 0; i < n; ++i) found |= (s[i] & exponent) == exponent;
    else
        for (int64_t i = 0; i < n; ++i) found |= (s[i * step] & exponent) == exponent;
    return !found;
}
// Whether the values of a part of an image are finite: rows [top, top + rows) and columns [left, left + wide).
bool is_finite(const Job& job, int64_t sample, int64_t first, int64_t last, int64_t top, int64_t rows, int64_t left, int64_t wide) {
    const Images& from = job.from;
    const bool mixed = from.apart[1] == 1 && from.apart[3] == job.channels;  // the channels of a row are one run of values
    if (mixed && first > 0) return true;  // checked with the first channels
    const int64_t n = mixed ? wide * job.channels : wide, step = mixed ? 1 : from.apart[3];
    for (int64_t c = first; c < (mixed ? 1 : last); ++c)
        for (int64_t y = top; y < top + rows; ++y) {
            const int64_t at = sample * from.apart[0] + c * from.apart[1] + y * from.apart[2] + left * from.apart[3];
            const bool finite = from.type == 0 ? is_finite(static_cast<const uint32_t*>(from.data) + at, step, n, uint32_t{0x7f800000})
                                               : is_finite(static_cast<const uint16_t*>(from.data) + at, step, n, static_cast<uint16_t>(from.type == 1 ? 0x7f80 : 0x7c00));
            if (!finite) return false;
        }
    return true;
}

// A register of 16 or 8 floats.
#if defined(__AVX512F__)
typedef __m512 Wide;
inline Wide wide(float x) { return _mm512_set1_ps(x); }
inline Wide wide(const float* p) { return _mm512_loadu_ps(p); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
inline void wide_store(float* p, Wide x) { _mm512_storeu_ps(p, x); }
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 Wide;
inline Wide wide(float x) { return _mm256_set1_ps(x); }
inline Wide wide(const float* p) { return _mm256_loadu_ps(p); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
inline void wide_store(float* p, Wide x) { _mm256_storeu_ps(p, x); }
#endif

// Writes x * scale + shift. `stream`: bypasses the caches, because the output is not read again here.
void scale_out(const float* __restrict p, float* __restrict o, int n, float scale, float shift, bool stream) {
    int i = 0;
#if defined(__SSE2__)
    if (stream && reinterpret_cast<uintptr_t>(o) % 64 == 0)
        for (; i + 16 <= n; i += 16)  // whole cache lines
            for (int h = i; h < i + 16; h += 4) _mm_stream_ps(o + h, _mm_loadu_ps(p + h) * _mm_set1_ps(scale) + _mm_set1_ps(shift));
#endif
    for (; i < n; ++i) o[i] = p[i] * scale + shift;
}

inline uint16_t to_bfloat(float x) {  // round to nearest even; images hold no NaN
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

void to_half(const float* __restrict s, uint16_t* __restrict d, int n) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), 0));
#endif
    for (; i < n; ++i) {
        const _Float16 h = static_cast<_Float16>(s[i]);
        std::memcpy(d + i, &h, 2);
    }
}

// Image index of a padded position; -1 means the value 0. Borders: 0 constant, 1 reflect, 2 replicate, 3 circular.
int64_t border_index(int64_t i, int64_t size, int border) {
    if (i >= 0 && i < size) return i;
    switch (border) {
        case 0: return -1;
        case 1: return i < 0 ? -i : 2 * size - 2 - i;
        case 2: return i < 0 ? 0 : size - 1;
        default: return (i % size + size) % size;
    }
}

// Weighted sums of `taps` rows. The accumulators stay in registers over all taps. Always inlined, because compilers may
// otherwise call `row` for every tap.
template <typename Row>
inline __attribute__((always_inline)) void weigh(const float* k, int taps, Row row, float* __restrict out, int64_t n) {
    int64_t x = 0;
#if defined(__AVX2__) && defined(__FMA__)
    constexpr int64_t lanes = sizeof(Wide) / 4;
    for (; x + 4 * lanes <= n; x += 4 * lanes) {
        Wide sum[4] = {};
        for (int t = 0; t < taps; ++t) {
            const float* s = row(t) + x;
            for (int j = 0; j < 4; ++j) sum[j] = wide_fma(wide(k[t]), wide(s + j * lanes), sum[j]);
        }
        for (int j = 0; j < 4; ++j) wide_store(out + x + j * lanes, sum[j]);
    }
#endif
    for (; x + LANES <= n; x += LANES) {
        float sum[LANES] = {};
        for (int t = 0; t < taps; ++t) {
            const float* __restrict s = row(t) + x;
            const float w = k[t];
            for (int l = 0; l < LANES; ++l) sum[l] = fma(w, s[l], sum[l]);
        }
        for (int l = 0; l < LANES; ++l) out[x + l] = sum[l];
    }
    for (; x < n; ++x) {
        float sum = 0.0f;
        for (int t = 0; t < taps; ++t) sum = fma(k[t], row(t)[x], sum);
        out[x] = sum;
    }
}

// The windows of a batch.
struct Crop {
    const int32_t *window, *resized, *offset;  // of CropWindows: [B, 4], [B, 2], [B, 2]
    const float* fill;       // [C]
    int32_t interpolation;   // 0 nearest, 1 bilinear, 2 bicubic
    const void* tasks;       // of resize.cpp, for RGB images that stay levels; null: images become floats
    int (*resize)(const void* tasks, int64_t number, uint8_t* canvas);  // gpuaug_resize_one
};

float cubic_weight(float x) {  // with a = -0.5, as Pillow's
    x = std::fabs(x);
    if (x < 1.0f) return (1.5f * x - 2.5f) * x * x + 1.0f;
    return x < 2.0f ? ((-0.5f * x + 2.5f) * x - 4.0f) * x + 2.0f : 0.0f;
}

// The pixels of the window that each position of the canvas takes along one axis.
struct Axis {
    int64_t first = 0, last = 0, least = 0, most = 0;  // positions inside the window's result; pixels that they take
    int taps = 1;
    std::vector<int32_t> from;  // of each position: its first pixel
    std::vector<float> weights;  // [positions, taps]

    Axis(int64_t count, int64_t size, int64_t resized, int64_t offset, int interpolation) {
        first = std::min(std::max<int64_t>(offset, 0), count);
        last = std::max(first, std::min(offset + resized, count));
        const double scale = static_cast<double>(size) / static_cast<double>(resized), wide = std::max(scale, 1.0);
        const double reach = wide * (interpolation == 2 ? 2.0 : 1.0);
        const bool copies = interpolation == 0 || size == resized;
        const auto taken = [=](int64_t i) {  // the centre of position i in the window, the first pixel and the one after the last
            const double center = (static_cast<double>(i - offset) + 0.5) * scale;
            const int64_t nearest = std::min<int64_t>(static_cast<int64_t>(center), size - 1);
            if (copies) return std::make_tuple(center, nearest, nearest + 1);
            const int64_t begin = static_cast<int64_t>(std::max(center - reach + 0.5, 0.0));
            return std::make_tuple(center, begin, std::min<int64_t>(static_cast<int64_t>(center + reach + 0.5), size));
        };
        for (int64_t i = first; i < last; ++i) taps = std::max(taps, static_cast<int>(std::get<2>(taken(i)) - std::get<1>(taken(i))));
        from.resize(count);
        weights.assign(count * taps, 0.0f);
        least = size;
        for (int64_t i = first; i < last; ++i) {
            const auto [center, begin, end] = taken(i);
            const int64_t start = std::min(begin, size - taps);  // all taps are inside
            double sum = 0.0;
            float* own = weights.data() + i * taps;
            for (int64_t k = begin; k < end; ++k) {
                const float x = static_cast<float>((static_cast<double>(k) - center + 0.5) / wide);
                own[k - start] = copies ? 1.0f : interpolation == 2 ? cubic_weight(x) : std::max(1.0f - std::fabs(x), 0.0f);
                sum += own[k - start];
            }
            for (int t = 0; t < taps; ++t) own[t] = static_cast<float>(own[t] / sum);
            from[i] = static_cast<int32_t>(start);
            least = std::min(least, start);
            most = std::max(most, start + taps);
        }
    }
};

// Computes `rows` rows of the result, at most ROWS: `line` has their pixels before the columns are weighed.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
constexpr int64_t ROWS = 8;

inline void transpose(const float* from, int64_t apart, float* to, int64_t to_apart) {  // 8 x 8
    __m256 a[8], b[8];
    for (int k = 0; k < 8; ++k) a[k] = _mm256_loadu_ps(from + k * apart);
    for (int k = 0; k < 8; k += 2) b[k] = _mm256_unpacklo_ps(a[k], a[k + 1]), b[k + 1] = _mm256_unpackhi_ps(a[k], a[k + 1]);
    for (int k = 0; k < 8; k += 4)
        for (int j = 0; j < 2; ++j) {
            a[k + 2 * j] = _mm256_shuffle_ps(b[k + j], b[k + j + 2], 0x44);
            a[k + 2 * j + 1] = _mm256_shuffle_ps(b[k + j], b[k + j + 2], 0xee);
        }
    for (int k = 0; k < 4; ++k) {
        _mm256_storeu_ps(to + k * to_apart, _mm256_permute2f128_ps(a[k], a[k + 4], 0x20));
        _mm256_storeu_ps(to + (k + 4) * to_apart, _mm256_permute2f128_ps(a[k], a[k + 4], 0x31));
    }
}

// A register has the same column of eight rows, because gathers of eight columns take ten times as long.
void weigh_columns(const Axis& columns, const std::vector<int32_t>&, const std::vector<float>&, std::vector<float>& line, int64_t stride, int64_t rows, float* to, int64_t width) {
    const int64_t count = columns.last - columns.first;
    line.resize(2 * ROWS * stride + ROWS * (count + 8));
    float* const turned = line.data() + ROWS * stride;
    float* const made = turned + ROWS * stride;
    for (int64_t x = 0; x < columns.most - columns.least; x += 8) transpose(line.data() + x, stride, turned + 8 * x, 8);
    for (int64_t x = 0; x < count; ++x) {
        const float* const k = columns.weights.data() + (columns.first + x) * columns.taps;
        const float* const s = turned + 8 * (columns.from[columns.first + x] - columns.least);
        __m256 sum = _mm256_setzero_ps();
        for (int t = 0; t < columns.taps; ++t) sum = _mm256_fmadd_ps(_mm256_set1_ps(k[t]), _mm256_loadu_ps(s + 8 * t), sum);
        _mm256_storeu_ps(made + 8 * x, sum);
    }
    to += columns.first;
    int64_t x = 0;
    for (; rows == ROWS && x + 8 <= count; x += 8) transpose(made + 8 * x, 8, to + x, width);
    for (; x < count; ++x)
        for (int64_t r = 0; r < rows; ++r) to[r * width + x] = made[8 * x + r];
}
#else
constexpr int64_t ROWS = 1;

void weigh_columns(const Axis& columns, const std::vector<int32_t>& index, const std::vector<float>& weight, std::vector<float>& line, int64_t, int64_t, float* __restrict to, int64_t count) {
    const float* __restrict from = line.data();
    const int32_t* const at = index.data();
    const float* const k = weight.data();
    int64_t x = columns.first;
#if defined(__AVX512F__)
    for (; x + 16 <= columns.last; x += 16) {
        __m512 sum = _mm512_setzero_ps();
        const bool close = at[(columns.taps - 1) * count + x + 15] - at[x] < 32;  // then two registers hold all that is taken
        const __m512 near = _mm512_loadu_ps(from + at[x]), far = _mm512_loadu_ps(from + at[x] + 16);
        const __m512i start = _mm512_set1_epi32(at[x]);
        for (int64_t t = x; t < columns.taps * count + x; t += count) {
            const __m512i places = _mm512_loadu_si512(at + t);
            const __m512 taken = close ? _mm512_permutex2var_ps(near, _mm512_sub_epi32(places, start), far)
                                       : _mm512_i32gather_ps(places, from, 4);
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(k + t), taken, sum);
        }
        _mm512_storeu_ps(to + x, sum);
    }
#endif
    for (; x < columns.last; ++x) {
        float sum = 0.0f;
        for (int64_t t = x; t < columns.taps * count + x; t += count) sum = fma(k[t], from[at[t]], sum);
        to[x] = sum;
    }
}
#endif

// `dst`: planes that lie `apart` floats apart
void cut_image(const Job& job, int64_t sample, float* dst, int64_t apart, std::vector<float>& plane, std::vector<float>& line) {
    const Images& source = job.from;
    const Crop& crop = *job.crop;
    const int32_t *box = crop.window + 4 * sample, *resized = crop.resized + 2 * sample, *offset = crop.offset + 2 * sample;
    const Axis rows(job.height, box[2], resized[0], offset[0], crop.interpolation);
    const Axis columns(job.width, box[3], resized[1], offset[1], crop.interpolation);
    const int64_t wide = columns.most - columns.least, count = job.width;
    const int64_t listed = ROWS == 1 ? columns.taps * count : 0;
    std::vector<int32_t> index(listed);  // [taps, count], for loops over columns
    std::vector<float> weight(listed);
    for (int t = 0; ROWS == 1 && t < columns.taps; ++t)
        for (int64_t x = columns.first; x < columns.last; ++x) {
            index[t * count + x] = columns.from[x] + t - static_cast<int32_t>(columns.least);
            weight[t * count + x] = columns.weights[x * columns.taps + t];
        }
    const bool empty = rows.first == rows.last || columns.first == columns.last;
    const int64_t stride = wide + 32;  // a vector may be read at the end of a row
    if (!empty) plane.resize((rows.most - rows.least) * wide), line.resize(ROWS * stride);
    for (int64_t c = 0; c < job.channels; ++c) {
        float* out = dst + c * apart;
        if (empty || rows.last - rows.first < job.height || columns.last - columns.first < job.width)
            std::fill(out, out + job.height * job.width, crop.fill[c]);
        if (empty) continue;
        const int64_t at = sample * source.apart[0] + c * source.apart[1] + (box[0] + rows.least) * source.apart[2] + (box[1] + columns.least) * source.apart[3];
        const bool floats = source.type == 0 && source.white == 1.0f && source.apart[3] == 1;  // read where they lie
        const float* const pixels = floats ? static_cast<const float*>(source.data) + at : plane.data();
        const int64_t below = floats ? source.apart[2] : wide;
        for (int64_t y = rows.least; y < rows.most && !floats; ++y)
            load_values(source.data, source.type, at + (y - rows.least) * source.apart[2], source.apart[3], source.white, plane.data() + (y - rows.least) * wide, wide);
        for (int64_t y = rows.first; y < rows.last; y += ROWS) {
            const int64_t some = std::min(ROWS, rows.last - y);
            for (int64_t r = 0; r < some; ++r) {
                const float* top = pixels + (rows.from[y + r] - rows.least) * below;
                weigh(rows.weights.data() + (y + r) * rows.taps, rows.taps, [=](int t) { return top + t * below; }, line.data() + r * stride, wide);
            }
            weigh_columns(columns, index, weight, line, stride, some, out + y * job.width, job.width);
        }
    }
}

// Augments images, one after the other, in the same memory.
struct Worker {
    std::vector<float> first, second, extra, row;
    std::vector<uint8_t> levels;  // of the image, cropped
    std::vector<int32_t> index;
    std::vector<uint32_t> packed;
    std::vector<double> fractions;
    std::vector<const float*> lines;
    std::vector<Statistic> stats, stats_next;  // of each group of channels
    std::vector<Op> program;
    const Op* jump = nullptr;  // the last discontinuous operation; all earlier ones must be bit-identical to Kornia
    const Job& job;
    Images from;  // where `load` finds the image `sample`
    bool checks = false, finite = true;  // whether the sweep looks for values that are not finite; whether none was found
    const int64_t C, groups, H, W, pixels, apart;  // apart: floats from plane to plane; for common sizes no multiple of 4 KB, to avoid aliasing

    explicit Worker(const Job& given)
        : stats((given.channels + 2) / 3), stats_next(stats.size()), job(given), from(job.from), C(job.channels), groups((C + 2) / 3),
          H(job.height), W(job.width), pixels(H * W), apart((pixels / LANES + 22) * LANES) {}

    // The operation for the channels of a group: its noise begins further on.
    Op of_group(Op op, int64_t group) const {
        if (group && op.table && op.code == NOISE) op.table += 3 * group * pixels;
        if (group && op.table && op.code == ERASE_NOISE)
            op.table += 3 * group * static_cast<int64_t>(op.a[2]) * static_cast<int64_t>(op.a[3]);
        return op;
    }

    // Copies a row of an image and extends it by `half` pixels on each side.
    void extend(const float* s, float* line, int64_t half, int border) const {
        std::memcpy(line + half, s, W * sizeof(float));
        for (int64_t i = 0; i < half; ++i) {
            const int64_t left = border_index(i - half, W, border), right = border_index(W + i, W, border);
            line[i] = left < 0 ? 0.0f : s[left];
            line[half + W + i] = right < 0 ? 0.0f : s[right];
        }
    }

    // A function of its own, as `warp`: inlined into a larger one, it is a seventh slower.
    __attribute__((noinline)) void blur(const Op& op, const float* in, float* out) {
        const int kx = static_cast<int>(op.a[0]), ky = static_cast<int>(op.a[1]), border = static_cast<int>(op.a[3]);
        extra.resize(pixels + W);
        row.resize(W + kx);
        lines.resize(ky);
        float* zero = extra.data() + pixels;  // a row of zeros, for a constant border
        std::fill(zero, zero + W, 0.0f);
        for (int c = 0; c < 3; ++c) {
            for (int64_t y = 0; y < H; ++y) {
                extend(in + c * apart + y * W, row.data(), kx / 2, border);
                const float* base = row.data();
                weigh(op.table, kx, [base](int t) { return base + t; }, extra.data() + y * W, W);
            }
            for (int64_t y = 0; y < H; ++y) {
                for (int t = 0; t < ky; ++t) {
                    const int64_t from = border_index(y + t - ky / 2, H, border);
                    lines[t] = from < 0 ? zero : extra.data() + from * W;
                }
                const float* const* all = lines.data();
                weigh(op.table + kx, ky, [all](int t) { return all[t]; }, out + c * apart + y * W, W);
            }
        }
    }

    // Encodes and decodes blocks of 8 x 8 in place. `q`: 64 divisors. Kornia rounds x to round(x) + (x - round(x))^3.
    static void code_blocks(float* plane, int64_t height, int64_t width, const float* q) {
        typedef float Eight __attribute__((vector_size(32)));
        static const struct Basis {
            Eight by_position[8], by_frequency[8];  // cos((2 x + 1) u pi / 16), orthonormal
            Basis() {
                for (int x = 0; x < 8; ++x)
                    for (int u = 0; u < 8; ++u) {
                        const double c = std::cos((2 * x + 1) * u * 3.14159265358979323846 / 16) * (u ? 0.5 : 0.35355339059327376);
                        by_position[x][u] = by_frequency[u][x] = static_cast<float>(c);
                    }
            }
        } basis;
        auto transform = [](const Eight* in, const Eight* right, const Eight* left, Eight* out) {
            Eight half[8];
            for (int i = 0; i < 8; ++i) {
                half[i] = in[i][0] * right[0];
                for (int k = 1; k < 8; ++k) half[i] += in[i][k] * right[k];
            }
            for (int i = 0; i < 8; ++i) {
                out[i] = left[0][i] * half[0];
                for (int k = 1; k < 8; ++k) out[i] += left[k][i] * half[k];
            }
        };
        Eight divisor[8];
        std::memcpy(divisor, q, sizeof divisor);
        for (int64_t y = 0; y < height; y += 8)
            for (int64_t x = 0; x < width; x += 8) {
                Eight block[8], coded[8];
                for (int i = 0; i < 8; ++i) {
                    std::memcpy(&block[i], plane + (y + i) * width + x, sizeof(Eight));
                    block[i] -= 128.0f;
                }
                transform(block, basis.by_position, basis.by_position, coded);
                for (int i = 0; i < 8; ++i) {
                    const Eight value = coded[i] / divisor[i];
                    Eight whole;
                    for (int k = 0; k < 8; ++k) whole[k] = __builtin_rintf(value[k]);
                    const Eight rest = value - whole;
                    coded[i] = (whole + rest * rest * rest) * divisor[i];
                }
                transform(coded, basis.by_frequency, basis.by_frequency, block);
                for (int i = 0; i < 8; ++i) {
                    block[i] += 128.0f;
                    std::memcpy(plane + (y + i) * width + x, &block[i], sizeof(Eight));
                }
            }
    }

    void jpeg(const Op& op, const float* in, float* out) {
        const int64_t tall = (H + 15) / 16 * 16, wide = (W + 15) / 16 * 16, all = tall * wide, h = tall / 2, w = wide / 2;
        extra.resize(4 * all);
        float* const full[3] = {extra.data(), extra.data() + all, extra.data() + 2 * all};
        float* const small[2] = {extra.data() + 3 * all, extra.data() + 3 * all + all / 4};
        row.resize(2 * wide);
        for (int64_t y = 0; y < tall; ++y) {  // the last row and column are repeated
            const int64_t from = std::min(y, H - 1) * W;
            const float *r = in + from, *g = r + apart, *b = g + apart;
            float *luma_row = full[0] + y * wide, *blue = full[1] + y * wide, *red = full[2] + y * wide;
            for (int64_t x = 0; x < W; ++x) {
                const float gray = 0.299f * r[x] + 0.587f * g[x] + 0.114f * b[x];
                luma_row[x] = 255.0f * gray;
                blue[x] = 255.0f * ((b[x] - gray) * 0.564f + 0.5f);
                red[x] = 255.0f * ((r[x] - gray) * 0.713f + 0.5f);
            }
            for (float* line : {luma_row, blue, red}) std::fill(line + W, line + wide, line[W - 1]);
        }
        // Halves the chroma: a Gaussian blur of 3 taps (sigma 0.5, reflected borders), then the mean of 2 x 2.
        const float side = 0.10650697891920077f, outer = 0.5f * side, inner = 0.5f * (1.0f - side);
        for (int c = 0; c < 2; ++c) {
            const float* s = full[1 + c];
            for (int64_t y = 0; y < h; ++y) {
                const float *l0 = s + (y ? 2 * y - 1 : 1) * wide, *l1 = s + 2 * y * wide, *l2 = l1 + wide;
                const float* l3 = s + (2 * y + 2 < tall ? 2 * y + 2 : tall - 2) * wide;
                float* line = row.data();
                for (int64_t x = 0; x < wide; ++x) line[x] = outer * (l0[x] + l3[x]) + inner * (l1[x] + l2[x]);
                float* to = small[c] + y * w;
                for (int64_t x = 0; x < w; ++x) {
                    const float before = line[x ? 2 * x - 1 : 1], after = line[2 * x + 2 < wide ? 2 * x + 2 : wide - 2];
                    to[x] = outer * (before + after) + inner * (line[2 * x] + line[2 * x + 1]);
                }
            }
            code_blocks(small[c], h, w, op.table + 64);
        }
        code_blocks(full[0], tall, wide, op.table);
        for (int64_t y = 0; y < H; ++y) {  // chroma is enlarged bilinearly
            const int64_t near = y / 2, other = y % 2 ? std::min(near + 1, h - 1) : std::max<int64_t>(near - 1, 0);
            for (int c = 0; c < 2; ++c) {
                const float *a = small[c] + near * w, *b = small[c] + other * w;
                float *line = full[1] + c * wide, *to = row.data() + c * wide;
                for (int64_t x = 0; x < w; ++x) line[x] = 0.75f * a[x] + 0.25f * b[x];
                for (int64_t x = 0; x < w; ++x) {
                    to[2 * x] = 0.25f * line[x ? x - 1 : 0] + 0.75f * line[x];
                    to[2 * x + 1] = 0.75f * line[x] + 0.25f * line[x + 1 < w ? x + 1 : w - 1];
                }
            }
            const float *luma_row = full[0] + y * wide, *blue = row.data(), *red = blue + wide;
            float *r = out + y * W, *g = r + apart, *b = g + apart;
            for (int64_t x = 0; x < W; ++x) {
                const float gray = luma_row[x] / 255.0f, cb = blue[x] / 255.0f - 0.5f, cr = red[x] / 255.0f - 0.5f;
                r[x] = unit(gray + 1.4025245442f * cr);
                g[x] = unit(gray - 0.7144034731f * cr - 0.3443401356f * cb);
                b[x] = unit(gray + 1.7730496454f * cb);
            }
        }
    }

    void sharpness(const Op& op, float* in, float* out) {
        const float f = op.a[0], side = 1.0f / 13.0f, middle = 5.0f / 13.0f;
        const bool levels = op.pillow;
        if (levels)
            for (int64_t i = 0; i < 3 * apart; ++i) in[i] = level(in[i]);
        for (int c = 0; c < 3; ++c) {
            const float* s = in + c * apart;
            float* d = out + c * apart;
            std::memcpy(d, s, W * sizeof(float));
            std::memcpy(d + (H - 1) * W, s + (H - 1) * W, W * sizeof(float));
            for (int64_t y = 1; y < H - 1; ++y) {
                const float* __restrict up = s + (y - 1) * W;
                const float* __restrict at = s + y * W;
                const float* __restrict down = s + (y + 1) * W;
                float* __restrict o = d + y * W;
                o[0] = at[0];
                o[W - 1] = at[W - 1];
                if (levels) {  // sums are exact
                    for (int64_t x = 1; x < W - 1; ++x) {
                        const float around = up[x - 1] + up[x] + up[x + 1] + at[x - 1] + at[x + 1] + down[x - 1] + down[x] + down[x + 1];
                        const float smooth = __builtin_floorf((2.0f * (around + 5.0f * at[x]) + 13.0f) * (1.0f / 26.0f));  // the quotient is never near an integer
                        o[x] = blended(smooth, at[x], f);
                    }
                    continue;
                }
                for (int64_t x = 1; x < W - 1; ++x) {
                    float sum = fma(up[x + 1], side, fma(up[x], side, up[x - 1] * side));
                    sum = fma(at[x + 1], side, fma(at[x], middle, fma(at[x - 1], side, sum)));
                    const float smooth = unit(fma(down[x + 1], side, fma(down[x], side, fma(down[x - 1], side, sum))));
                    o[x] = unit(smooth + (at[x] - smooth) * f);
                }
            }
        }
        if (levels)
            for (int64_t i = 0; i < 3 * apart; ++i) out[i] = value(out[i]);
    }

    typedef float Pixel __attribute__((vector_size(16)));
    static Pixel fma4(Pixel a, float w, Pixel c) {
        Pixel out;
        for (int i = 0; i < 4; ++i) out[i] = fma(a[i], w, c[i]);
        return out;
    }

    // The offset and the weights of the four taps of each pixel in a row.
    void taps(const float* __restrict px, const float* __restrict py, int32_t* __restrict offset, float* __restrict w0,
              float* __restrict w1, float* __restrict w2, float* __restrict w3, float least, float most_x, float most_y, int64_t stride) const {
        const int32_t width = static_cast<int32_t>(W), height = static_cast<int32_t>(H), apart_rows = static_cast<int32_t>(stride);
        for (int32_t x = 0; x < width; ++x) {
            const float sx = low(high(px[x], least), most_x), sy = low(high(py[x], least), most_y);
            const float ix = __builtin_floorf(sx), iy = __builtin_floorf(sy);
            const float u = sx - ix, v = sy - iy, e = 1.0f - u, n = 1.0f - v;
            w0[x] = e * n;
            w1[x] = u * n;
            w2[x] = e * v;
            w3[x] = u * v;
            // clamp again as integers: even after a NaN, no tap may be outside the buffer
            const int32_t column = std::min(std::max(static_cast<int32_t>(ix), -1), width);
            const int32_t line = std::min(std::max(static_cast<int32_t>(iy), -1), height);
            offset[x] = (line + 1) * apart_rows + column + 1;
        }
    }

#if defined(__AVX512F__)
    static __m512 lanes(const Pixel* image, const int32_t* o, int64_t tap) {  // one tap of the pixels 0, 4, 8 and 12 of `o`
        const auto pixel = [image, tap](int32_t at) { return _mm_load_ps(reinterpret_cast<const float*>(image + at + tap)); };
        __m512 out = _mm512_castps128_ps512(pixel(o[0]));
        out = _mm512_insertf32x4(out, pixel(o[4]), 1);
        out = _mm512_insertf32x4(out, pixel(o[8]), 2);
        return _mm512_insertf32x4(out, pixel(o[12]), 3);
    }
    template <int J>
    static __m512 four_pixels(const Pixel* image, const int32_t* o, int64_t stride, const float* const* weights, int64_t x) {
        const auto weight = [weights, x](int k) { return _mm512_permute_ps(_mm512_loadu_ps(weights[k] + x), J * 0x55); };
        __m512 sum = _mm512_mul_ps(lanes(image, o + J, 0), weight(0));
        sum = _mm512_fmadd_ps(lanes(image, o + J, 1), weight(1), sum);
        sum = _mm512_fmadd_ps(lanes(image, o + J, stride), weight(2), sum);
        return _mm512_fmadd_ps(lanes(image, o + J, stride + 1), weight(3), sum);
    }
#endif

    // Bilinear or nearest warp by a matrix from output to input positions in -1..1. Padding: 0 zeros, 1 border, 2 reflection.
    __attribute__((noinline)) void warp(const Op& op, const float* in, float* out) {
        const int64_t stride = W + 3;  // one zero before each row and two after, so taps need no bounds check
        extra.resize(((H + 3) * stride + 1) * 4 + 4);
        Pixel* image = reinterpret_cast<Pixel*>((reinterpret_cast<uintptr_t>(extra.data()) + 15) & ~static_cast<uintptr_t>(15));
        const Pixel zero = {0.0f, 0.0f, 0.0f, 0.0f};
        const float *r = in, *g = r + apart, *b = g + apart;
        std::fill(image, image + stride, zero);
        for (int64_t y = 0; y < H; ++y) {
            Pixel* line = image + (y + 1) * stride;
            line[0] = line[W + 1] = line[W + 2] = zero;
            float* __restrict flat = reinterpret_cast<float*>(line + 1);
            int64_t x = 0;
#if defined(__AVX512F__)
            const __m512i pixel = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            for (; x + 16 <= W; x += 16) {
                const float* s = r + y * W + x;
                const __m512 red = _mm512_loadu_ps(s), green = _mm512_loadu_ps(s + apart), blue = _mm512_loadu_ps(s + 2 * apart);
                for (int k = 0; k < 4; ++k) {
                    const __m512i from = _mm512_add_epi32(pixel, _mm512_set1_epi32(4 * k));
                    __m512 out = _mm512_maskz_permutexvar_ps(0x1111, from, red);
                    out = _mm512_mask_permutexvar_ps(out, 0x2222, from, green);
                    _mm512_storeu_ps(flat + 4 * x + 16 * k, _mm512_mask_permutexvar_ps(out, 0x4444, from, blue));
                }
            }
#elif defined(__SSE2__)
            for (; x + 4 <= W; x += 4) {
                __m128 p0 = _mm_loadu_ps(r + y * W + x), p1 = _mm_loadu_ps(g + y * W + x), p2 = _mm_loadu_ps(b + y * W + x), p3 = _mm_setzero_ps();
                _MM_TRANSPOSE4_PS(p0, p1, p2, p3);
                _mm_storeu_ps(flat + 4 * x, p0);
                _mm_storeu_ps(flat + 4 * x + 4, p1);
                _mm_storeu_ps(flat + 4 * x + 8, p2);
                _mm_storeu_ps(flat + 4 * x + 12, p3);
            }
#endif
            for (; x < W; ++x) {
                flat[4 * x] = r[y * W + x];
                flat[4 * x + 1] = g[y * W + x];
                flat[4 * x + 2] = b[y * W + x];
                flat[4 * x + 3] = 0.0f;
            }
        }
        std::fill(image + (H + 1) * stride, image + (H + 3) * stride, zero);
        const float* a = op.a;
        const int padding = static_cast<int>(a[9]);
        const bool corners = a[10] != 0.0f, projective = a[11] != 0.0f;
        row.resize(6 * W);
        index.resize(W);
        float *px = row.data(), *py = px + W;
        float *w0 = py + W, *w1 = w0 + W, *w2 = w1 + W, *w3 = w2 + W;
        const float* const weights[4] = {w0, w1, w2, w3};
        int32_t* offset = index.data();
        auto reflect = [corners](float v, float size) {
            if (corners && size == 1.0f) return 0.0f;
            const float lowest = corners ? 0.0f : -0.5f, span = corners ? size - 1.0f : size;
            v = std::fabs(v - lowest);
            const float flips = std::floor(v / span), rest = v - flips * span;
            return std::fmod(flips, 2.0f) == 0.0f ? rest + lowest : span - rest + lowest;
        };
        const float* ramp = job.ramps + ((projective ? 2 : 0) + (corners ? 1 : 0)) * (W + H);
        // from -1..1 to pixels, as in torch's grid_sample
        const float half_x = 0.5f * static_cast<float>(corners ? W - 1 : W), half_y = 0.5f * static_cast<float>(corners ? H - 1 : H);
        const float less = corners ? 0.0f : 0.5f;
        for (int64_t y = 0; y < H; ++y) {
            const float vy = ramp[W + y];
            for (int64_t x = 0; x < W; ++x) {
                float gx = a[0] * ramp[x] + a[1] * vy + a[2], gy = a[3] * ramp[x] + a[4] * vy + a[5];
                if (projective) {
                    const float w = a[6] * ramp[x] + a[7] * vy + a[8], divisor = w == 0.0f ? 1e-30f : w;
                    gx /= divisor;
                    gy /= divisor;
                }
                px[x] = fma(gx + 1.0f, half_x, -less);
                py[x] = fma(gy + 1.0f, half_y, -less);
            }
            if (padding == 2)
                for (int64_t x = 0; x < W; ++x) px[x] = reflect(px[x], static_cast<float>(W)), py[x] = reflect(py[x], static_cast<float>(H));
            if (a[12] != 0.0f)  // the nearest pixel is the only tap with a weight
                for (int64_t x = 0; x < W; ++x) px[x] = __builtin_rintf(px[x]), py[x] = __builtin_rintf(py[x]);
            const float least = padding == 0 ? -1.0f : 0.0f, beyond = padding == 0 ? 0.0f : 1.0f;
            const float most_x = static_cast<float>(W) - beyond, most_y = static_cast<float>(H) - beyond;
            taps(px, py, offset, w0, w1, w2, w3, least, most_x, most_y, stride);
            float *dr = out + y * W, *dg = dr + apart, *db = dg + apart;
            int64_t x = 0;
#if defined(__AVX512F__)
            // lane l of part j is pixel 4 l + j, so a transpose within each lane gives the channels in order
            for (; x + 16 <= W; x += 16) {
                const int32_t* o = offset + x;
                __m512 part[4];
                part[0] = four_pixels<0>(image, o, stride, weights, x);
                part[1] = four_pixels<1>(image, o, stride, weights, x);
                part[2] = four_pixels<2>(image, o, stride, weights, x);
                part[3] = four_pixels<3>(image, o, stride, weights, x);
                const __m512 rg01 = _mm512_unpacklo_ps(part[0], part[1]), rg23 = _mm512_unpacklo_ps(part[2], part[3]);
                const __m512 b01 = _mm512_unpackhi_ps(part[0], part[1]), b23 = _mm512_unpackhi_ps(part[2], part[3]);
                _mm512_storeu_ps(dr + x, _mm512_shuffle_ps(rg01, rg23, 0x44));
                _mm512_storeu_ps(dg + x, _mm512_shuffle_ps(rg01, rg23, 0xee));
                _mm512_storeu_ps(db + x, _mm512_shuffle_ps(b01, b23, 0x44));
            }
#elif defined(__FMA__)
            for (; x + 4 <= W; x += 4) {
                __m128 p[4];
                for (int j = 0; j < 4; ++j) {
                    const float* const s = reinterpret_cast<const float*>(image + offset[x + j]);
                    p[j] = _mm_mul_ps(_mm_load_ps(s), _mm_broadcast_ss(w0 + x + j));
                    p[j] = _mm_fmadd_ps(_mm_load_ps(s + 4), _mm_broadcast_ss(w1 + x + j), p[j]);
                    p[j] = _mm_fmadd_ps(_mm_load_ps(s + 4 * stride), _mm_broadcast_ss(w2 + x + j), p[j]);
                    p[j] = _mm_fmadd_ps(_mm_load_ps(s + 4 * stride + 4), _mm_broadcast_ss(w3 + x + j), p[j]);
                }
                _MM_TRANSPOSE4_PS(p[0], p[1], p[2], p[3]);
                _mm_storeu_ps(dr + x, p[0]);
                _mm_storeu_ps(dg + x, p[1]);
                _mm_storeu_ps(db + x, p[2]);
            }
#endif
            for (; x < W; ++x) {
                const Pixel* s = image + offset[x];
                Pixel value = s[0] * weights[0][x];
                value = fma4(s[1], weights[1][x], value);
                value = fma4(s[stride], weights[2][x], value);
                value = fma4(s[stride + 1], weights[3][x], value);
                dr[x] = value[0];
                dg[x] = value[1];
                db[x] = value[2];
            }
        }
    }

    // One uint32 per pixel: the levels of r, g and b in its bytes.
    static void pack(const float* __restrict r, const float* __restrict g, const float* __restrict b, uint32_t* __restrict o, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            const int x = static_cast<int>(level(r[i])), y = static_cast<int>(level(g[i])), z = static_cast<int>(level(b[i]));
            o[i] = static_cast<uint32_t>(x | (y << 8) | (z << 16));
        }
    }
    static void unpack(const uint32_t* __restrict s, float* __restrict r, float* __restrict g, float* __restrict b, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            const int32_t v = static_cast<int32_t>(s[i]);
            r[i] = byte_value(v & 255);
            g[i] = byte_value((v >> 8) & 255);
            b[i] = byte_value((v >> 16) & 255);
        }
    }

    typedef double Quad __attribute__((vector_size(32)));  // r, g, b and a fourth number
    static Quad quad(uint32_t pixel) {
#if defined(__AVX2__)
        return reinterpret_cast<Quad>(_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(static_cast<int>(pixel)))));
#else
        const int v = static_cast<int>(pixel);
        return Quad{static_cast<double>(v & 255), static_cast<double>((v >> 8) & 255), static_cast<double>((v >> 16) & 255), 0.0};
#endif
    }
    static uint32_t whole(Quad v) {
#if defined(__AVX2__)
        const __m128i low_bytes = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_shuffle_epi8(_mm256_cvttpd_epi32(reinterpret_cast<__m256d>(v)), low_bytes)));
#else
        return static_cast<uint32_t>(static_cast<int>(v[0]) | static_cast<int>(v[1]) << 8 | static_cast<int>(v[2]) << 16);
#endif
    }
    // Both functions interpolate between p[1] and p[2].
    static Quad linear_row(const uint32_t* p, double d) {
        return d == 0.0 ? quad(p[1]) : quad(p[1]) + (quad(p[2]) - quad(p[1])) * d;
    }
    static Quad cubic_row(const uint32_t* p, double d) {
        return d == 0.0 ? quad(p[1]) : cubic(quad(p[0]), quad(p[1]), quad(p[2]), quad(p[3]), d);
    }
    static Quad cubic(Quad v1, Quad v2, Quad v3, Quad v4, double d) {
        return v2 + d * ((-v1 + v3) + d * ((2.0 * (v1 - v2) + v3 - v4) + d * (-v1 + v2 - v3 + v4)));
    }

    // Computes, for each pixel of row `y`, the index of the first tap in the padded image (-1: outside) and the fractions
    // between the taps. `m`: Pillow's matrix, for edges of pixels.
    void sources(const double* m, int64_t y, double back, int64_t stride, int32_t* __restrict from, double* __restrict dx, double* __restrict dy) const {
        const double line = static_cast<double>(y) + 0.5, width = static_cast<double>(W), height = static_cast<double>(H);
        const double x1 = m[1] * line, y1 = m[4] * line;
        const int32_t apart_rows = static_cast<int32_t>(stride), n = static_cast<int32_t>(W);
        for (int32_t i = 0; i < n; ++i) {
            const double at = static_cast<double>(i) + 0.5;
            const double px = m[0] * at + x1 + m[2], py = m[3] * at + y1 + m[5];
            const bool inside = (px >= 0.0) & (px < width) & (py >= 0.0) & (py < height);
            const double sx = (inside ? px : 0.0) - back, sy = (inside ? py : 0.0) - back;
            const double ix = __builtin_floor(sx), iy = __builtin_floor(sy);
            dx[i] = sx - ix;
            dy[i] = sy - iy;
            const int32_t index_of = (static_cast<int32_t>(iy) + 1) * apart_rows + static_cast<int32_t>(ix) + 1;
            from[i] = inside ? index_of : -1;
        }
    }

    // Pillow's affine transform. A tap outside the image is the nearest pixel inside.
    void resample(const Op& op, const float* in, float* out) {
        double m[6];
        std::memcpy(m, op.a, sizeof m);
        const int interpolation = static_cast<int>(op.a[12]);
        const uint32_t fill = static_cast<uint32_t>(op.a[13]) | static_cast<uint32_t>(op.a[14]) << 8 | static_cast<uint32_t>(op.a[15]) << 16;
        const int64_t stride = W + 4;
        packed.resize((H + 4) * stride + W);
        index.resize(W);
        fractions.resize(2 * W);
        double *dx = fractions.data(), *dy = dx + W;
        uint32_t *image = packed.data(), *made = image + (H + 4) * stride;
        for (int64_t y = 0; y < H; ++y) {
            const float* s = in + y * W;
            uint32_t* line = image + (y + 2) * stride;
            pack(s, s + apart, s + 2 * apart, line + 2, W);
            line[0] = line[1] = line[2];
            line[W + 2] = line[W + 3] = line[W + 1];
        }
        for (int k = 0; k < 2; ++k) {
            std::copy_n(image + 2 * stride, stride, image + k * stride);
            std::copy_n(image + (H + 1) * stride, stride, image + (H + 2 + k) * stride);
        }
        const double back = interpolation == 0 ? 0.0 : 0.5;
        for (int64_t y = 0; y < H; ++y) {
            sources(m, y, back, stride, index.data(), dx, dy);
            for (int64_t x = 0; x < W; ++x) {
                if (index[x] < 0) {
                    made[x] = fill;
                    continue;
                }
                const uint32_t *s = image + index[x], *p = s + stride, *q = p + stride;  // rows of taps; `s` is the first
                if (interpolation == 0) {
                    made[x] = p[1];
                } else if (interpolation == 1) {
                    const Quad v = linear_row(p, dx[x]);
                    made[x] = whole(dy[x] == 0.0 ? v : v + (linear_row(q, dx[x]) - v) * dy[x]);
                } else {
                    Quad v = cubic_row(p, dx[x]);
                    if (dy[x] != 0.0) v = cubic(cubic_row(s, dx[x]), v, cubic_row(q, dx[x]), cubic_row(q + stride, dx[x]), dy[x]);
                    for (int k = 0; k < 4; ++k) v[k] = v[k] < 0.0 ? 0.0 : (v[k] > 255.0 ? 255.0 : v[k]);
                    made[x] = whole(v);
                }
            }
            float* o = out + y * W;
            unpack(made, o, o + apart, o + 2 * apart, W);
        }
    }

    void turn(int32_t code, std::vector<float>& v) {
        for (int64_t c = 0; c < C; ++c) {
            float* p = v.data() + c * apart;
            if (code == HFLIP)
                for (int64_t y = 0; y < H; ++y) std::reverse(p + y * W, p + (y + 1) * W);
            else
                for (int64_t y = 0; y < H / 2; ++y) std::swap_ranges(p + y * W, p + (y + 1) * W, p + (H - 1 - y) * W);
        }
    }

    template <typename T>
    static void interleave(const T* r, const T* g, const T* b, T* __restrict o, int n) {
        for (int i = 0; i < n; ++i) o[3 * i] = r[i], o[3 * i + 1] = g[i], o[3 * i + 2] = b[i];
    }

    void store(int64_t sample, int64_t group, const Block& at, float* const* planes, int n) const {
        const bool narrow = job.dst_type != 0;
        const int64_t start = at.y * W + at.x, first_value = (sample * pixels + start) * C + 3 * group;
        const int some = static_cast<int>(std::min<int64_t>(C - 3 * group, 3));
        float line[3][BLOCK];
        uint16_t halves[3][BLOCK];
        for (int c = 0; c < some; ++c) {
            const int64_t channel = 3 * group + c, to = (sample * C + channel) * pixels + start;
            float* wide = narrow || job.channels_last ? line[c] : static_cast<float*>(job.dst) + to;
            scale_out(planes[c], wide, n, job.scale[channel], job.shift[channel], wide != line[c]);
            if (!narrow) continue;
            uint16_t* __restrict o = job.channels_last ? halves[c] : static_cast<uint16_t*>(job.dst) + to;
            if (job.dst_type == 2) to_half(line[c], o, n);
            else
                for (int i = 0; i < n; ++i) o[i] = to_bfloat(line[c][i]);
        }
        if (!job.channels_last) return;
        if (C == 3) {
            if (narrow) interleave(halves[0], halves[1], halves[2], static_cast<uint16_t*>(job.dst) + first_value, n);
            else interleave(line[0], line[1], line[2], static_cast<float*>(job.dst) + first_value, n);
            return;
        }
        for (int c = 0; c < some; ++c)
            for (int i = 0; i < n; ++i) {
                if (narrow) static_cast<uint16_t*>(job.dst)[first_value + i * C + c] = halves[c][i];
                else static_cast<float*>(job.dst)[first_value + i * C + c] = line[c][i];
            }
    }

    // Loads the image, runs the operations [from, to), collects the statistic that `wanted` needs, and stores.
    void sweep(int64_t sample, bool buffered, bool mirror, bool upside, const Op* from, const Op* to, const Op* wanted, bool& outside, bool keep, bool last) {
        const int64_t rows = W >= BLOCK ? 1 : std::max<int64_t>(1, BLOCK / W), wide = std::min<int64_t>(W, BLOCK);
        alignas(64) float scratch[3][BLOCK + LANES];  // padded, so that the distance is not a power of two
        if (wanted)
            for (Statistic& stat : stats_next) stat.reset(wanted->code);
        bool end_outside = outside;
        for (int64_t y = 0; y < H; y += rows)
            for (int64_t x = 0; x < W; x += wide)
                for (int64_t group = 0; group < groups; ++group) {
                    const Block at{y, x, std::min(rows, H - y), std::min(wide, W - x)};
                    const int n = static_cast<int>(at.rows * at.width), some = static_cast<int>(std::min<int64_t>(C - 3 * group, 3));
                    float* planes[3] = {scratch[0], scratch[1], scratch[2]};
                    if (buffered || keep)
                        for (int c = 0; c < 3; ++c) planes[c] = first.data() + (3 * group + c) * apart + y * W + x;  // in place
                    if (checks) check(sample, group, at, mirror, upside);
                    if (!buffered) load(sample, group, at, mirror, upside, planes);
                    end_outside = outside;
                    for (const Op* op = from; op != to; ++op) {
                        if (end_outside && !keeps_outside(*op)) {
                            for (float* p : planes) clamp_block(p, n);
                            end_outside = false;
                        }
                        pointwise(of_group(*op, group), stats[group], planes, n, at, pixels, W, op < jump, some);
                        end_outside = may_leave_unit(*op, end_outside);
                    }
                    if (wanted) {
                        if (end_outside && !keeps_outside(*wanted)) {
                            for (float* p : planes) clamp_block(p, n);
                        }
                        collect(*wanted, stats_next[group], planes, n, C == 3, some);
                    }
                    if (last) store(sample, group, at, planes, n);
                }
        outside = end_outside;
        checks = false;  // all values were read
        if (wanted) {
            if (wanted->code == CONTRAST && C != 3) {  // around the mean of all channels
                double sum = 0.0;
                for (const Statistic& stat : stats_next) sum += stat.gray;
                for (Statistic& stat : stats_next) stat.gray = sum / static_cast<double>(C);
            }
            for (Statistic& stat : stats_next) finish(*wanted, stat, pixels);
            std::swap(stats, stats_next);
        }
    }
    // Looks at what `load` is about to read, so it is read from memory once.
    __attribute__((noinline)) void check(int64_t sample, int64_t group, const Block& at, bool mirror, bool upside) {
        const int64_t top = upside ? H - at.y - at.rows : at.y, left = mirror ? W - at.x - at.width : at.x;
        finite = finite && is_finite(job, sample, 3 * group, std::min(3 * group + 3, C), top, at.rows, left, at.width);
    }
    __attribute__((always_inline)) void load(int64_t sample, int64_t group, const Block& at, bool mirror, bool upside, float* const* planes) {
        const bool bytes = from.type == 3 && C == 3 && from.white == 255.0f && from.apart[1] == 1 && from.apart[3] == 3;
        for (int64_t row_in = 0; row_in < at.rows; ++row_in) {
            const int64_t y = upside ? H - 1 - (at.y + row_in) : at.y + row_in;
            const int64_t o = row_in * at.width, line = sample * from.apart[0] + y * from.apart[2];
            const int n = static_cast<int>(at.width);
            if (bytes) {
                const uint8_t* s = static_cast<const uint8_t*>(from.data) + line;
                if (mirror) load_bytes<true>(s + (W - at.x - n) * 3, planes[0] + o, planes[1] + o, planes[2] + o, n);
                else load_bytes<false>(s + at.x * 3, planes[0] + o, planes[1] + o, planes[2] + o, n);
                continue;
            }
            const int64_t column = mirror ? W - 1 - at.x : at.x, step = mirror ? -from.apart[3] : from.apart[3];
            for (int c = 0; c < 3; ++c) {  // a channel that is missing in the last group is the last one again
                const int64_t channel = std::min(3 * group + c, C - 1);
                load_values(from.data, from.type, line + channel * from.apart[1] + column * from.apart[3], step, from.white, planes[c] + o, n);
            }
        }
    }

    // Returns whether all values are finite, if the job refuses others.
    bool run(int64_t sample) {
        program.clear();
        checks = job.refuses && !job.crop;
        finite = !job.refuses || !job.crop || is_finite(job, sample, 0, C, 0, job.from.height, 0, job.from.width);
        if (!finite) return false;
        bool mirror = false, upside = false, commutes = true;
        for (int64_t i = 0; i < job.steps; ++i) {
            const int64_t k = sample * job.steps + i;
            const Op op{job.code[k], job.args + k * ARGS, job.tables ? job.tables[k] : nullptr};
            if (op.code == NONE) continue;
            if (op.code == HFLIP && commutes) mirror = !mirror;
            else if (op.code == VFLIP && commutes) upside = !upside;
            else {
                commutes = commutes && has(op.code, IS_ANYWHERE);
                program.push_back(op);
            }
        }
        jump = program.data();
        for (const Op& op : program)
            if (has(op.code, IS_JUMPS) || op.pillow) jump = &op;
        const bool whole = job.from.white == (job.from.type == 3 ? 255.0f : 65535.0f);
        const bool resized = job.crop && job.crop->tasks;
        bool buffered = job.crop && !resized, outside = buffered || job.from.type < 3 || !whole, ready = false;
        if (resized) {
            levels.resize(3 * pixels + 64);
            if (job.crop->resize(job.crop->tasks, sample, levels.data())) throw std::bad_alloc();
            from.data = levels.data();
            from.apart[0] = 0, from.apart[1] = 1, from.apart[2] = 3 * W, from.apart[3] = 3;
        }
        if (buffered) {
            first.resize(3 * groups * apart);
            cut_image(job, sample, first.data(), apart, extra, row);
            if (mirror) turn(HFLIP, first);
            if (upside) turn(VFLIP, first);
            for (int64_t c = C; c < 3 * groups; ++c) std::copy_n(first.data() + (C - 1) * apart, pixels, first.data() + c * apart);
        }
        size_t pos = 0;
        while (true) {
            size_t end = pos;
            while (end < program.size() && has(program[end].code, IS_POINTWISE) && program[end].code > VFLIP && (!has(program[end].code, IS_STATISTIC) || (ready && end == pos))) ++end;
            const Op* ops = program.data();
            if (end == program.size()) {
                sweep(sample, buffered, mirror, upside, ops + pos, ops + end, nullptr, outside, false, true);
                return finite;
            }
            const Op& next = program[end];
            const bool statistic = has(next.code, IS_STATISTIC);
            // if the statistic is of the source, nothing is buffered, and the next sweep reads the source again
            const bool keep = !(statistic && end == pos && !buffered);
            if (keep) first.resize(3 * groups * apart);
            if (!(buffered && end == pos && !statistic)) sweep(sample, buffered, mirror, upside, ops + pos, ops + end, statistic ? &next : nullptr, outside, keep, false);
            if (keep) buffered = true;
            if (buffered) mirror = upside = false;
            if (statistic) {
                ready = true;
                pos = end;
                continue;
            }
            ready = false;
            if (next.code == HFLIP || next.code == VFLIP) {
                turn(next.code, first);
            } else {
                if (outside && !keeps_outside(next)) {
                    clamp_block(first.data(), 3 * groups * apart);
                    outside = false;
                }
                second.resize(3 * groups * apart);
                for (int64_t group = 0; group < groups; ++group) {
                    float *in = first.data() + 3 * group * apart, *out = second.data() + 3 * group * apart;
                    if (next.code == BLUR) blur(next, in, out);
                    else if (next.code == SHARPNESS) sharpness(next, in, out);
                    else if (next.code == RESAMPLE) resample(next, in, out);
                    else if (next.code == JPEG) jpeg(next, in, out);
                    else warp(next, in, out);
                }
                std::swap(first, second);
            }
            pos = end + 1;
        }
    }
};

// Calls run(i) for all images. Returns what the last failure was; 0: none.
template <typename Make>
int each_image(int64_t batch, int64_t threads, Make make) {
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    auto work = [&] {
        try {
            auto run = make();
            for (int64_t i = next++; i < batch; i = next++)
                if (!run(i)) failed = NOT_FINITE;
        } catch (...) {  // only std::bad_alloc is possible
            failed = NO_MEMORY;
        }
#if defined(__SSE2__)
        _mm_sfence();  // orders the streaming stores of scale_out
#endif
    };
    on_threads(std::min(threads, batch), work);
    return failed;
}

}  // namespace

extern "C" int gpuaug_augment(const Job* job) {
    return each_image(job->batch, job->threads, [job] {
        return [worker = Worker(*job)](int64_t i) mutable { return worker.run(i); };
    });
}
