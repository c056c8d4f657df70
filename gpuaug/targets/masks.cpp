// Crops, resizes and warps masks by nearest neighbour. masks.py states the formulas.
//
// If a matrix only flips, scales and shifts, two tables are enough: the source row of each output row, and the source
// column of each output column. Otherwise, the mask is first cropped and resized to a canvas. Each output pixel then
// takes one pixel of this canvas. At last, areas get their values: what later canvases lost, and erased rectangles.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct Task {
    const uint8_t* src;          // first pixel of the mask; null: the output becomes `fill`
    int64_t row, column;         // bytes to the pixel below, and to the pixel on the right
    const double* inverse;       // [3, 3], output to canvas; null: the identity
    const double* areas;         // [count, 15], see Warp in masks.py; an infinite x1: no area
    void* out;                   // [H, W], contiguous
    int32_t bytes;               // of one pixel of the mask: 1 or 4
    int32_t top, left, height, width;  // window of the mask
    int32_t to_height, to_width;       // size of the window after resizing
    int32_t y, x;                      // position of the window's corner on the canvas; negative: cropped
    int32_t count;                     // of areas
};

namespace {

constexpr double IDENTITY[9] = {1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0};

// The source of each pixel along one output axis: byte offsets for first <= i < last. Other pixels are outside.
struct Axis {
    std::vector<int64_t> offset;
    int64_t first = 0, last = 0;

    // Output i takes the canvas pixel floor(scale * (i + 0.5) + shift).
    void make(int64_t size, double scale, double shift, int64_t corner, int64_t to, int64_t start, int64_t from, int64_t stride) {
        offset.resize(size);
        first = last = 0;
        for (int64_t i = 0; i < size; ++i) {
            const double at = scale * (static_cast<double>(i) + 0.5) + shift;
            if (!(at >= 0.0 && at < static_cast<double>(size))) continue;
            const int64_t k = static_cast<int64_t>(at) - corner;
            if (k < 0 || k >= to) continue;
            if (last == 0) first = i;  // the outputs inside are neighbours, because `at` is monotonic
            last = i + 1;
            offset[i] = (start + (2 * k + 1) * from / (2 * to)) * stride;
        }
    }

    bool adjacent(int64_t stride) const {
        for (int64_t i = first + 1; i < last; ++i)
            if (offset[i] != offset[i - 1] + stride) return false;
        return true;
    }
};

// `Small` holds all values of the masks and the fill; the outputs may be wider.
template <class Small, class Out>
struct Worker {
    int64_t H, W;
    Small fill;
    Axis down, across;
    std::vector<Small> canvas;
    std::vector<double> xs, ys, ws;
    std::vector<int32_t> sources;  // canvas pixel of each output of a row

    void axes(const Task& t, double across_scale, double across_shift, double down_scale, double down_shift) {
        down.make(H, down_scale, down_shift, t.y, t.to_height, t.top, t.height, t.row);
        across.make(W, across_scale, across_shift, t.x, t.to_width, t.left, t.width, t.column);
    }

    template <class In, class To>
    void copy(const Task& t, To* out) const {
        const int64_t x0 = across.first, x1 = across.last;
        const int64_t* const offset = across.offset.data();
        const bool whole = sizeof(In) == sizeof(To) && across.adjacent(sizeof(In));
        for (int64_t i = 0; i < H; ++i, out += W) {
            if (i < down.first || i >= down.last || x0 == x1) {
                std::fill_n(out, W, static_cast<To>(fill));
                continue;
            }
            if (i > down.first && down.offset[i] == down.offset[i - 1]) {
                std::memcpy(out, out - W, W * sizeof(To));
                continue;
            }
            const uint8_t* const from = t.src + down.offset[i];
            std::fill_n(out, x0, static_cast<To>(fill));
            std::fill_n(out + x1, W - x1, static_cast<To>(fill));
            if (whole) {
                std::memcpy(out + x0, from + offset[x0], (x1 - x0) * sizeof(To));
                continue;
            }
            pick<In>(from, offset + x0, x1 - x0, out + x0);
        }
    }

    // Without `__restrict`, the compiler assumes that each write may change the offsets.
    template <class In, class To>
    static void pick(const uint8_t* __restrict from, const int64_t* __restrict offset, int64_t count, To* __restrict out) {
        for (int64_t k = 0; k < count; ++k) {
            In value;
            std::memcpy(&value, from + offset[k], sizeof value);
            out[k] = static_cast<To>(value);
        }
    }

    template <class To>
    void copy_any(const Task& t, To* out) const {
        if (t.bytes == 1) copy<uint8_t>(t, out);
        else copy<int32_t>(t, out);
    }

    static void take(const Small* __restrict from, const int32_t* __restrict pixel, int64_t count, Out* __restrict out) {
        for (int64_t k = 0; k < count; ++k) out[k] = static_cast<Out>(from[pixel[k]]);
    }

    // Writes the canvas pixel of each output of row `i`. A pixel outside is H * W.
    template <bool affine>
    void locate(const double* m, int64_t i, int32_t* __restrict pixels) const {
        const double v = static_cast<double>(i) + 0.5, x_of_row = m[1] * v, y_of_row = m[4] * v, w_of_row = m[7] * v;
        const double h = static_cast<double>(H), w = static_cast<double>(W);
        const int32_t width = static_cast<int32_t>(W), outside = static_cast<int32_t>(H * W);
        const double *__restrict a = xs.data(), *__restrict b = ys.data(), *__restrict c = ws.data();
        for (int64_t j = 0; j < W; ++j) {
            const double z = affine ? 1.0 : (c[j] + w_of_row) + m[8];
            const double x = ((a[j] + x_of_row) + m[2]) / z, y = ((b[j] + y_of_row) + m[5]) / z;
            const bool inside = (z > 0.0) & (x >= 0.0) & (x < w) & (y >= 0.0) & (y < h);
            const int32_t row = static_cast<int32_t>(inside ? y : 0.0), column = static_cast<int32_t>(inside ? x : 0.0);
            pixels[j] = inside ? row * width + column : outside;
        }
    }

    // Pixels inside a rectangle of a canvas, or outside it, get a value. All other pixels stay.
    void cover(const double* area, Out* __restrict out) const {
        const double *const m = area, x1 = area[9], y1 = area[10], x2 = area[11], y2 = area[12];
        const bool inside = area[13] > 0.0;
        const Out value = static_cast<Out>(area[14]);
        for (int64_t i = 0; i < H; ++i, out += W) {
            const double v = static_cast<double>(i) + 0.5, x_of_row = m[1] * v, y_of_row = m[4] * v, w_of_row = m[7] * v;
            for (int64_t j = 0; j < W; ++j) {
                const double u = static_cast<double>(j) + 0.5, z = (m[6] * u + w_of_row) + m[8];
                const double x = ((m[0] * u + x_of_row) + m[2]) / z, y = ((m[3] * u + y_of_row) + m[5]) / z;
                const bool at = (z > 0.0) & (x >= x1) & (x < x2) & (y >= y1) & (y < y2);
                out[j] = at == inside ? value : out[j];
            }
        }
    }

    void run(const Task& t) {
        move(t);
        for (const double* area = t.areas; area < t.areas + 15 * t.count; area += 15)
            if (!std::isinf(area[9])) cover(area, static_cast<Out*>(t.out));
    }

    void move(const Task& t) {
        Out* const out = static_cast<Out*>(t.out);
        if (t.src == nullptr) {
            std::fill_n(out, H * W, static_cast<Out>(fill));
            return;
        }
        const double* const m = t.inverse == nullptr ? IDENTITY : t.inverse;
        const bool is_affine = m[6] == 0.0 && m[7] == 0.0 && m[8] == 1.0;
        if (is_affine && m[1] == 0.0 && m[3] == 0.0) {
            axes(t, m[0], m[2], m[4], m[5]);
            copy_any(t, out);
            return;
        }
        canvas.resize(H * W + 1);
        axes(t, 1.0, 0.0, 1.0, 0.0);
        copy_any(t, canvas.data());
        canvas[H * W] = fill;
        for (auto* table : {&xs, &ys, &ws}) table->resize(W);
        sources.resize(W);
        for (int64_t j = 0; j < W; ++j) {
            const double u = static_cast<double>(j) + 0.5;
            xs[j] = m[0] * u, ys[j] = m[3] * u, ws[j] = m[6] * u;
        }
        for (int64_t i = 0; i < H; ++i) {
            if (is_affine) locate<true>(m, i, sources.data());
            else locate<false>(m, i, sources.data());
            take(canvas.data(), sources.data(), W, out + i * W);
        }
    }
};

template <class Small, class Out>
int place(const Task* tasks, int64_t count, int64_t H, int64_t W, int32_t fill, int32_t threads) {
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
    auto work = [&] {
        try {
            Worker<Small, Out> worker{H, W, static_cast<Small>(fill)};
            for (int64_t i = next++; i < count; i = next++) worker.run(tasks[i]);
        } catch (...) {  // only std::bad_alloc is possible
            failed = 1;
        }
    };
    on_threads(std::min<int64_t>(threads, count), work);
    return failed;
}

}  // namespace

// Pastes objects of one mask [H, W] into another. `renumber` has the new number of each object of `mate`; 0: it is not
// pasted. `extents` [2, count, 5] gets, for each number of `own` before and after: its pixels, and the smallest and
// largest x and y. Its smallest values must be large, and its largest ones negative.
extern "C" void gpuaug_paste(const int32_t* own, const int32_t* mate, const int32_t* renumber, int64_t H, int64_t W, int64_t count,
                             int32_t* out, uint8_t* pasted, int64_t* extents) {
    for (int64_t y = 0; y < H; ++y, own += W, mate += W, out += W, pasted += W) {
        for (int64_t x = 0; x < W; ++x) {
            const int32_t number = renumber[mate[x]];
            pasted[x] = number != 0;
            out[x] = number != 0 ? number : own[x];
        }
        for (int64_t x = 0, end; x < W; x = end) {  // runs of one object, covered or not
            for (end = x + 1; end < W && own[end] == own[x] && pasted[end] == pasted[x]; ++end) {}
            if (own[x] == 0) continue;
            for (int64_t after = 0; after < (pasted[x] ? 1 : 2); ++after) {
                int64_t* const e = extents + 5 * (after * count + own[x]);
                e[0] += end - x;
                e[1] = std::min(e[1], x), e[2] = std::min(e[2], y);
                e[3] = std::max(e[3], end - 1), e[4] = std::max(e[4], y);
            }
        }
    }
}

// Fills [count, H, W] outputs of `bytes` per pixel: 1, 4 or 8. H * W < 2^31. Returns 1 if memory runs out.
extern "C" int gpuaug_place(const Task* tasks, int64_t count, int64_t H, int64_t W, int32_t bytes, int32_t fill, int32_t threads) {
    const bool small = fill <= 255 && std::all_of(tasks, tasks + count, [](const Task& t) { return t.bytes == 1; });
    const auto run = bytes == 1 ? place<uint8_t, uint8_t>
        : bytes == 4 ? (small ? place<uint8_t, int32_t> : place<int32_t, int32_t>)
                     : (small ? place<uint8_t, int64_t> : place<int32_t, int64_t>);
    return run(tasks, count, H, W, fill, threads);
}
