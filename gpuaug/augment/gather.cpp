// Gathers outputs from tiles on a canvas. gather.py states the formulas.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

struct Tile {
    const uint8_t* pixels;          // first pixel of the tile's image
    int64_t row;                    // bytes to the pixel below
    int64_t left, top;              // position of that pixel on the canvas
    int64_t x1, y1, x2, y2;         // the part of the canvas that shows the tile
    int64_t add, most;              // `add` is added to numbers of objects from 1 to `most`; larger ones become 0
};

namespace {

constexpr int64_t ONE = 256;  // steps between two pixels
constexpr int32_t BIAS = 32768 * 256 + 32768;  // adds what `keep` has subtracted, and rounds

inline int64_t step_of(double at) { return static_cast<int64_t>(std::floor(at * ONE + 0.5)); }

struct Job {
    const Tile* tiles;       // [outputs, count]
    const double* inverses;  // [outputs, 6], from the output to the canvas
    int64_t count, height, width, channels, fill;

    const Tile* find(const Tile* own, int64_t x, int64_t y) const {
        for (const Tile* t = own; t < own + count; ++t)
            if (x >= t->x1 && x < t->x2 && y >= t->y1 && y < t->y2) return t;
        return nullptr;
    }
};

// The range of j for which a * j + b, which may round either way, is at least `low` and below `high`, with a margin.
inline void narrow(double a, double b, double low, double high, int64_t& first, int64_t& last) {
    constexpr double margin = 0.01;
    low += margin, high -= margin;
    if (a == 0.0 || !(low < high)) {
        if (!(b >= low && b < high)) last = first;
        return;
    }
    double from = (low - b) / a, to = (high - b) / a;
    if (from > to) std::swap(from, to);
    if (!(to >= static_cast<double>(first)) || !(from < static_cast<double>(last))) {
        last = first;
        return;
    }
    if (from > static_cast<double>(first)) first = static_cast<int64_t>(std::ceil(from));
    if (to < static_cast<double>(last)) last = static_cast<int64_t>(std::ceil(to));
    if (last < first) last = first;
}

// Of an output whose axes are those of the canvas, for each of its columns: where its left neighbour begins in a row of
// the canvas, and the weights of both neighbours, 16 bits each.
struct Columns {
    struct Rows {  // what `keep` made of two rows of a tile, and their numbers on the canvas
        std::vector<int16_t> values[2];
        int64_t number[2];
    };
    std::vector<int32_t> offset, across;
    Rows rows[9];  // of each tile

    void start(const double* xs, double shift, int64_t width, int64_t channels) {
        offset.resize(width), across.resize(width);
        for (int64_t j = 0; j < width; ++j) {
            const double at = std::min(std::max(xs[j] + shift - 0.5, -4e6), 4e6);  // farther away is no tile
            const int32_t x = static_cast<int32_t>(at * ONE + 0.5), part = x & (ONE - 1);
            offset[j] = static_cast<int32_t>((x >> 8) * channels), across[j] = (ONE - part) | part << 16;
        }
        for (Rows& each : rows) each.number[0] = each.number[1] = -1;
    }
};

// Blends pixels of a row of a tile with their right neighbours: times 256, less 32768 to fit into 16 bits.
template <int C>
void keep(const uint8_t* row, const Columns& columns, int64_t size, int64_t first, int64_t last, int16_t* out) {
    for (int64_t j = first; j < last; ++j)
        for (int64_t c = 0; c < size; ++c) {
            const uint8_t* const at = row + columns.offset[j] + c;
            *out++ = static_cast<int16_t>(at[0] * (columns.across[j] & 65535) + at[size] * (columns.across[j] >> 16) - 32768);
        }
}

// Pixels first <= j < last, all of whose four neighbours are of one tile.
template <int C>
void blend(const Tile& t, int64_t channels, const double* xs, double x_row, double x_shift, const double* ys,
           double y_row, double y_shift, int64_t first, int64_t last, uint8_t* out) {
    const int64_t size = C ? C : channels;
    for (int64_t j = first; j < last; ++j) {
        // positions inside a tile are not negative, so rounding towards 0 rounds down
        const int32_t x = static_cast<int32_t>(((xs[j] + x_row) + x_shift - 0.5) * ONE + 0.5);
        const int32_t y = static_cast<int32_t>(((ys[j] + y_row) + y_shift - 0.5) * ONE + 0.5);
        const int32_t fx = x & (ONE - 1), fy = y & (ONE - 1);
        const uint8_t* const above = t.pixels + ((y >> 8) - t.top) * t.row + ((x >> 8) - t.left) * size;
        const uint8_t* const below = above + t.row;
        const int32_t w11 = fx * fy, w10 = (fy << 8) - w11, w01 = (fx << 8) - w11, w00 = 65536 - w01 - w10 - w11;
        for (int64_t c = 0; c < size; ++c) {
            const int32_t sum = above[c] * w00 + above[c + size] * w01 + below[c] * w10 + below[c + size] * w11;
            out[j * size + c] = static_cast<uint8_t>((sum + 32768) >> 16);
        }
    }
}

#if defined(__SSE4_1__)
// Three channels of two pixels, with the weights `across`, times 256, less 32768 to fit into 16 bits. Reads 8 bytes, so 2
// bytes behind the right neighbour.
inline __m128i mixed(const uint8_t* from, __m128i across) {
    const __m128i beside = _mm_setr_epi8(0, 3, 1, 4, 2, 5, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);  // both neighbours
    const __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), beside);
    return _mm_sub_epi32(_mm_madd_epi16(_mm_cvtepu8_epi16(bytes), across), _mm_set1_epi32(32768));
}

template <>
void blend<3>(const Tile& t, int64_t, const double* xs, double x_row, double x_shift, const double* ys, double y_row,
              double y_shift, int64_t first, int64_t last, uint8_t* out) {
    const __m128i bias = _mm_set1_epi32(BIAS);
    for (int64_t j = first; j < last; ++j) {
        const int32_t x = static_cast<int32_t>(((xs[j] + x_row) + x_shift - 0.5) * ONE + 0.5);
        const int32_t y = static_cast<int32_t>(((ys[j] + y_row) + y_shift - 0.5) * ONE + 0.5);
        const int32_t fx = x & (ONE - 1), fy = y & (ONE - 1);
        const uint8_t* const above = t.pixels + ((y >> 8) - t.top) * t.row + ((x >> 8) - t.left) * 3;
        const __m128i across = _mm_set1_epi32((ONE - fx) | fx << 16), down = _mm_set1_epi32((ONE - fy) | fy << 16);
        const __m128i rows = _mm_packs_epi32(mixed(above, across), mixed(above + t.row, across));
        const __m128i pairs = _mm_unpacklo_epi16(rows, _mm_srli_si128(rows, 8));
        const __m128i sum = _mm_srli_epi32(_mm_add_epi32(_mm_madd_epi16(pairs, down), bias), 16);
        const __m128i bytes = _mm_packus_epi16(_mm_packs_epi32(sum, sum), sum);
        const int32_t pixel = _mm_cvtsi128_si32(bytes);
        std::memcpy(out + 3 * j, &pixel, 2);
        out[3 * j + 2] = static_cast<uint8_t>(pixel >> 16);
    }
}

template <>
void keep<3>(const uint8_t* row, const Columns& columns, int64_t, int64_t first, int64_t last, int16_t* out) {
    for (int64_t j = first; j < last; ++j, out += 3) {  // writes 2 bytes behind the last pixel
        const __m128i values = mixed(row + columns.offset[j], _mm_set1_epi32(columns.across[j]));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi32(values, values));
    }
}
#endif

// The pixels first <= j < last of a row, if the axes of the output are those of the canvas. Two rows of a tile make a
// row of the output, and the next one needs mostly one more. `at`: position of the row on the canvas.
template <int C>
void blend_parallel(const Tile& t, int64_t channels, Columns& columns, Columns::Rows& rows, double at, int64_t first,
                    int64_t last, uint8_t* out) {
    const int64_t size = C ? C : channels;
    const int32_t y = static_cast<int32_t>(at * ONE + 0.5), below = y & (ONE - 1), above = ONE - below;
    const int16_t* two[2];
    for (int64_t k = 0; k < 2; ++k) {
        const int64_t number = (y >> 8) + k;
        std::vector<int16_t>& kept = rows.values[number & 1];
        if (rows.number[number & 1] != number) {
            kept.resize((last - first) * size + 4);
            keep<C>(t.pixels + (number - t.top) * t.row - t.left * size, columns, size, first, last, kept.data());
            rows.number[number & 1] = number;
        }
        two[k] = kept.data();
    }
    uint8_t* const to = out + first * size;
    for (int64_t k = 0; k < (last - first) * size; ++k)
        to[k] = static_cast<uint8_t>((two[0][k] * above + two[1][k] * below + BIAS) >> 16);
}

// One pixel whose neighbours may be of several tiles, or of none.
void blend_any(const Job& job, const Tile* own, double x_at, double y_at, uint8_t* out) {
    const int64_t x = step_of(x_at), y = step_of(y_at), fx = x & (ONE - 1), fy = y & (ONE - 1);
    const int64_t left = x >> 8, top = y >> 8;
    bool near = false;
    for (const Tile* t = own; t < own + job.count; ++t)
        near |= left + 1 >= t->x1 && left < t->x2 && top + 1 >= t->y1 && top < t->y2;
    if (!near) {
        std::memset(out, static_cast<int>(job.fill), job.channels);
        return;
    }
    const uint8_t* at[4];
    for (int64_t k = 0; k < 4; ++k) {
        const int64_t cx = left + (k & 1), cy = top + (k >> 1);
        const Tile* const t = job.find(own, cx, cy);
        at[k] = t == nullptr ? nullptr : t->pixels + (cy - t->top) * t->row + (cx - t->left) * job.channels;
    }
    const int64_t weights[4] = {(ONE - fx) * (ONE - fy), fx * (ONE - fy), (ONE - fx) * fy, fx * fy};
    for (int64_t c = 0; c < job.channels; ++c) {
        int64_t sum = 32768;
        for (int64_t k = 0; k < 4; ++k) sum += weights[k] * (at[k] == nullptr ? job.fill : at[k][c]);
        out[c] = static_cast<uint8_t>(sum >> 16);
    }
}

template <int C>
void images(const Job& job, int64_t number, std::vector<double>& xs, std::vector<double>& ys, Columns& columns, uint8_t* out) {
    const Tile* const own = job.tiles + number * job.count;
    const double* const m = job.inverses + number * 6;
    // with larger numbers, the margin of `narrow` may not cover the rounding of float64
    const bool exact = std::all_of(m, m + 6, [](double x) { return std::abs(x) < 1e6; });
    for (int64_t j = 0; j < job.width; ++j) {
        xs[j] = m[0] * (static_cast<double>(j) + 0.5);
        ys[j] = m[3] * (static_cast<double>(j) + 0.5);
    }
    const bool parallel = m[1] == 0.0 && m[3] == 0.0;
    if (parallel) columns.start(xs.data(), m[2], job.width, job.channels);
    for (int64_t i = 0; i < job.height; ++i, out += job.width * job.channels) {
        const double v = static_cast<double>(i) + 0.5, x_row = m[1] * v, y_row = m[4] * v;
        int64_t done = 0;  // tiles may be met in any order, so the spans are sorted by their first pixel
        struct Span { int64_t first, last; const Tile* tile; } spans[9];
        int64_t some = 0;
        for (const Tile* t = own; t < own + job.count; ++t) {
            int64_t first = 0, last = exact ? job.width : 0;
            // for pixels all of whose four neighbours are inside
            const int64_t end = C ? std::min(t->x2 - 1, t->left + t->row / C - 2) : t->x2 - 1;  // see blend<3>
            narrow(m[0], m[0] * 0.5 + x_row + m[2] - 0.5, t->x1, end, first, last);
            narrow(m[3], m[3] * 0.5 + y_row + m[5] - 0.5, t->y1, t->y2 - 1, first, last);
            if (first < last) spans[some++] = {first, last, t};
        }
        std::sort(spans, spans + some, [](const Span& a, const Span& b) { return a.first < b.first; });
        for (int64_t k = 0; k <= some; ++k) {
            const int64_t until = k < some ? spans[k].first : job.width;
            for (; done < until; ++done)
                blend_any(job, own, (xs[done] + x_row) + m[2] - 0.5, (ys[done] + y_row) + m[5] - 0.5, out + done * job.channels);
            if (k == some) break;
            const Tile& t = *spans[k].tile;
            if (parallel)
                blend_parallel<C>(t, job.channels, columns, columns.rows[&t - own], y_row + m[5] - 0.5, done, spans[k].last, out);
            else
                blend<C>(t, job.channels, xs.data(), x_row, m[2], ys.data(), y_row, m[5], done, spans[k].last, out);
            done = std::max(done, spans[k].last);
        }
    }
}

template <class T>
void masks(const Job& job, int64_t number, std::vector<double>& xs, std::vector<double>& ys, uint8_t* bytes) {
    const Tile* const own = job.tiles + number * job.count;
    const double* const m = job.inverses + number * 6;
    T* out = reinterpret_cast<T*>(bytes);
    for (int64_t j = 0; j < job.width; ++j) {
        xs[j] = m[0] * (static_cast<double>(j) + 0.5);
        ys[j] = m[3] * (static_cast<double>(j) + 0.5);
    }
    const Tile* last = own;
    for (int64_t i = 0; i < job.height; ++i, out += job.width) {
        const double v = static_cast<double>(i) + 0.5, x_row = m[1] * v, y_row = m[4] * v;
        for (int64_t j = 0; j < job.width; ++j) {
            const int64_t x = static_cast<int64_t>(std::floor((xs[j] + x_row) + m[2]));
            const int64_t y = static_cast<int64_t>(std::floor((ys[j] + y_row) + m[5]));
            // neighbours are mostly of the same tile
            const bool same = x >= last->x1 && x < last->x2 && y >= last->y1 && y < last->y2;
            const Tile* const t = same ? last : job.find(own, x, y);
            if (t == nullptr) {
                out[j] = static_cast<T>(job.fill);
                continue;
            }
            last = t;
            T value;
            std::memcpy(&value, t->pixels + (y - t->top) * t->row + (x - t->left) * sizeof(T), sizeof value);
            out[j] = value <= 0 || value > t->most ? 0 : static_cast<T>(value + t->add);
        }
    }
}

}  // namespace

// Fills [outputs, height, width, channels] of uint8, bilinear; or with channels 0, by the nearest pixel,
// [outputs, height, width] of `bytes` per pixel, 1 or 4. Returns 1 if memory runs out.
extern "C" int gpuaug_gather(const Tile* tiles, const double* inverses, int64_t outputs, int64_t count, int64_t height,
                             int64_t width, int64_t channels, int64_t bytes, int64_t fill, uint8_t* out, int64_t threads) {
    const Job job{tiles, inverses, count, height, width, channels, fill};
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    const int64_t size = height * width * (channels ? channels : bytes);
    auto work = [&] {
        try {
            std::vector<double> xs(width), ys(width);
            Columns columns;
            for (int64_t b = next++; b < outputs; b = next++) {
                uint8_t* const own = out + b * size;
                if (channels == 3) images<3>(job, b, xs, ys, columns, own);
                else if (channels) images<0>(job, b, xs, ys, columns, own);
                else if (bytes == 1) masks<uint8_t>(job, b, xs, ys, own);
                else masks<int32_t>(job, b, xs, ys, own);
            }
        } catch (...) {  // only std::bad_alloc is possible
            failed = 1;
        }
    };
    on_threads(std::min(threads, outputs), work);
    return failed;
}

// own = (own * (256 - steps) + other * steps) / 256, rounded down.
extern "C" void gpuaug_blend(uint8_t* own, const uint8_t* other, int64_t size, int64_t steps) {
    const uint16_t of_other = static_cast<uint16_t>(steps), of_own = static_cast<uint16_t>(ONE - steps);
    for (int64_t k = 0; k < size; ++k) {
        const uint16_t sum = static_cast<uint16_t>(own[k] * of_own + other[k] * of_other);  // at most 65,280
        own[k] = static_cast<uint8_t>(sum >> 8);
    }
}
