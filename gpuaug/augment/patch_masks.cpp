// The loops of patch_masks.py. tests/augment/test_patch_masks.py has the same laws in plain Python.

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace philox;

namespace {

// The samples of one copy of a view, and their masks; the layout is that of `_Rows` in patch_masks.py.
struct Rows {
    const uint32_t* key;
    const int64_t *indices, *repeats;  // [batch]
    int64_t batch, epoch, height, width, planes;
    uint8_t* out;      // [batch, planes, height, width]
    int64_t* counts;   // [batch, planes], patches that are 1
};

// Uniforms in [0, 1) of one sample, four per Philox block from block 1 on; patch_masks.py uses block 0.
class Uniforms {
  public:
    // `few`: computes only 4 blocks at first, which is enough for most samples of I-JEPA.
    Uniforms(const Rows& rows, int64_t sample, bool few = false)
        : rows_(rows), index_(rows.indices[sample]), repeat_(rows.repeats[sample]), few_(few) {}

    const double* four() {
        advance();
        for (int k = 0; k < 4; ++k) values_[k] = (words_[k][lane_] >> 8) * 0x1p-24;
        return values_;
    }

    int64_t below(int64_t count) {  // a whole number from 0 to count - 1: count times a uniform, rounded down
        if (place_ == 0) advance();
        const int64_t u = words_[place_][lane_] >> 8;
        place_ = (place_ + 1) % 4;
        return u * count >> 24;
    }

  private:
    void advance() {
        if (++lane_ < filled_) return;
        if (few_ && block_ == 1) refill<4>();
        else refill<LANES>();
    }

    template <int COUNT>
    void refill() {
        uint32_t k0[COUNT], k1[COUNT];
        for (int lane = 0; lane < COUNT; ++lane) {
            words_[0][lane] = static_cast<uint32_t>(index_);
            words_[1][lane] = static_cast<uint32_t>(static_cast<uint64_t>(index_) >> 32);
            words_[2][lane] = static_cast<uint32_t>(rows_.epoch);
            words_[3][lane] = (block_ + lane) | static_cast<uint32_t>(repeat_) << 16;
            k0[lane] = rows_.key[0];
            k1[lane] = rows_.key[1];
        }
        rounds<COUNT>(words_[0], words_[1], words_[2], words_[3], k0, k1);
        block_ += COUNT;
        filled_ = COUNT;
        lane_ = 0;
    }

    const Rows& rows_;
    const int64_t index_, repeat_;
    const bool few_;
    uint32_t block_ = 1;
    int lane_ = 0, filled_ = 0, place_ = 0;
    uint32_t words_[4][LANES];
    double values_[4];
};

// Moves a random choice of `count` of the `size` numbers to the front.
void choose(uint16_t* numbers, int64_t size, int64_t count, Uniforms& uniforms) {
    for (int64_t k = 0; k < count; ++k) std::swap(numbers[k], numbers[k + uniforms.below(size - k)]);
}

// Writes the numbers of all patches that are 0, and returns how many there are. Takes eight at a time.
int64_t list(const uint8_t* mask, int64_t size, uint16_t* numbers) {
    int64_t count = 0;
    for (int64_t k = 0; k < size; k += 8) {
        uint64_t eight = 0, all = 0x0101010101010101u;
        if (size - k < 8) all &= (uint64_t{1} << 8 * (size - k)) - 1;  // little-endian
        std::memcpy(&eight, mask + k, std::min<int64_t>(size - k, 8));
        for (eight ^= all; eight; eight &= eight - 1)
            numbers[count++] = static_cast<uint16_t>(k + __builtin_ctzll(eight) / 8);
    }
    return count;
}

// Sets the first `count` patches of `out` that are 0 in `mask` to 1, and all others to 0. There are at least as many.
void keep_first(const uint8_t* mask, int64_t size, int64_t count, uint8_t* out) {
    for (int64_t k = 0; k < size; k += 8) {
        const int64_t bytes = std::min<int64_t>(size - k, 8);
        uint64_t eight = 0x0101010101010101u;
        std::memcpy(&eight, mask + k, bytes);  // behind the end: 1
        eight ^= 0x0101010101010101u;
        int64_t ones = __builtin_popcountll(eight);
        for (; ones > count; --ones) eight &= ~(uint64_t{1} << (63 - __builtin_clzll(eight)));  // little-endian
        count -= ones;
        std::memcpy(out + k, &eight, bytes);
    }
}

// Sets the patches of a rectangle to 1. Changes eight at a time, as far as they are before `end`: rows are short.
void paint(uint8_t* mask, const uint8_t* end, int64_t width, int64_t top, int64_t left, int64_t h, int64_t w) {
    for (int64_t y = top; y < top + h; ++y)
        for (int64_t x = 0; x < w; x += 8) {
            uint8_t* const at = mask + y * width + left + x;
            if (end - at < 8) {
                std::memset(at, 1, std::min<int64_t>(w - x, 8));
                continue;
            }
            uint64_t eight, ones = 0x0101010101010101u;
            if (w - x < 8) ones &= (uint64_t{1} << 8 * (w - x)) - 1;  // little-endian
            std::memcpy(&eight, at, 8);
            eight |= ones;
            std::memcpy(at, &eight, 8);
        }
}

// A mask with one bit per patch. Each row begins with a new word of 64 bits.
class Bits {
  public:
    Bits(int64_t height, int64_t width)
        : height_(height), width_(width), words_((width + 63) / 64), rows_(height * words_), bytes_(height * width + 8) {}

    void clear() { std::fill(rows_.begin(), rows_.end(), 0); }

    int64_t count(int64_t top, int64_t left, int64_t h, int64_t w) const {  // ones in a rectangle
        int64_t ones = 0;
        each_word(left, w, [&](int64_t word, uint64_t part) {
            for (int64_t y = top; y < top + h; ++y) ones += __builtin_popcountll(rows_[y * words_ + word] & part);
        });
        return ones;
    }

    void set(int64_t top, int64_t left, int64_t h, int64_t w) {
        each_word(left, w, [&](int64_t word, uint64_t part) {
            for (int64_t y = top; y < top + h; ++y) rows_[y * words_ + word] |= part;
        });
    }

    void set(int64_t patch) { rows_[patch / width_ * words_ + patch % width_ / 64] |= uint64_t{1} << patch % width_ % 64; }

    void set_outside(int64_t top, int64_t left, int64_t h, int64_t w) {  // of a rectangle
        set(0, 0, top, width_);
        set(top + h, 0, height_ - top - h, width_);
        set(top, 0, h, left);
        set(top, left + w, h, width_ - left - w);
    }

    const uint8_t* bytes() {  // [height, width]
        for (int64_t y = 0; y < height_; ++y)
            for (int64_t x = 0; x < width_; x += 8) {  // what is behind the row's end is the next row, and written later
                const uint64_t eight = rows_[y * words_ + x / 64] >> x % 64 & 255;
                const uint64_t apart = eight * 0x0101010101010101u & 0x8040201008040201u;  // bit k in byte k
                const uint64_t ones = (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
                std::memcpy(bytes_.data() + y * width_ + x, &ones, 8);  // little-endian
            }
        return bytes_.data();
    }

  private:
    // Calls f(word, part) for the words of a row that columns left to left + w - 1 are in.
    template <typename F>
    void each_word(int64_t left, int64_t w, F f) const {
        for (int64_t word = left / 64; word * 64 < left + w; ++word) {
            const int64_t from = std::max<int64_t>(left - word * 64, 0), to = std::min<int64_t>(left + w - word * 64, 64);
            if (from < to) f(word, ~uint64_t{0} >> (64 - (to - from)) << from);
        }
    }

    const int64_t height_, width_, words_;
    std::vector<uint64_t> rows_;
    std::vector<uint8_t> bytes_;
};

}  // namespace

// Rectangles until `wanted[sample]` patches are masked, or ten attempts in a row fail.
//
// wanted: float64 [batch]; smallest: area; cap: largest number of patches that a rectangle adds; low, high: range of the
// logarithm of height / width; fill: mask single patches until there are `wanted`; shift: roll the mask at random.
extern "C" void gpuaug_block_masks(const Rows* rows, const double* wanted, double smallest, double cap, double low,
                                   double high, int64_t fill, int64_t shift) {
    const int64_t height = rows->height, width = rows->width, size = height * width;
    std::vector<uint16_t> free(size);
    Bits mask(height, width);
    for (int64_t sample = 0; sample < rows->batch; ++sample) {
        uint8_t* out = rows->out + sample * size;
        mask.clear();
        int64_t masked = 0, down = 0, right = 0;
        if (wanted[sample] > 0) {
            Uniforms uniforms(*rows, sample);
            int attempts = 0;
            while (masked + 1 <= wanted[sample] && attempts < 10) {  // less than one patch can be missing: iBOT
                const double most = std::min(wanted[sample] - masked, cap), *u = uniforms.four();
                const double side = std::sqrt(smallest + u[0] * (most - smallest));
                const double stretch = std::exp((low + u[1] * (high - low)) / 2);  // the root of height / width
                const int64_t h = std::nearbyint(side * stretch), w = std::nearbyint(side / stretch);
                ++attempts;
                if (h >= height || w >= width) continue;
                const int64_t top = u[2] * (height - h + 1), left = u[3] * (width - w + 1);
                const int64_t added = h * w - mask.count(top, left, h, w);
                if (added < 1 || added > most) continue;
                mask.set(top, left, h, w);
                masked += added;
                attempts = 0;
            }
            const int64_t missing = fill ? static_cast<int64_t>(wanted[sample]) - masked : 0;
            if (missing > 0) {
                choose(free.data(), list(mask.bytes(), size, free.data()), missing, uniforms);
                for (int64_t k = 0; k < missing; ++k) mask.set(free[k]);
                masked += missing;
            }
            if (shift) {
                const double* u = uniforms.four();
                down = u[0] * height, right = u[1] * width;
            }
        }
        const uint8_t* from = mask.bytes();
        if (!shift) std::memcpy(out, from, size);
        for (int64_t y = 0; shift && y < height; ++y, from += width)
            std::rotate_copy(from, from + width - right, from + width, out + (y + down) % height * width);
        rows->counts[sample] = masked;
    }
}

// Target blocks, and a context block without them, for each sample. Planes: mask, context (not written), targets.
//
// sizes: int64 [batch, 4], height and width of a target and of the context block; edge: 1: positions include the last
// row and column; keep: the context must have more patches.
extern "C" void gpuaug_multi_block_masks(const Rows* rows, const int64_t* sizes, int64_t edge, int64_t keep) {
    const int64_t height = rows->height, width = rows->width, size = height * width, targets = rows->planes - 2;
    Bits taken(height, width);  // the patches of targets
    std::vector<int64_t> corners(2 * targets);
    const uint8_t* const end = rows->out + rows->batch * rows->planes * size;
    for (int64_t sample = 0; sample < rows->batch; ++sample, sizes += 4) {
        Uniforms uniforms(*rows, sample, true);
        const int64_t h = sizes[0], w = sizes[1], context_h = sizes[2], context_w = sizes[3];
        uint8_t* planes = rows->out + sample * rows->planes * size;
        int64_t* counts = rows->counts + sample * rows->planes;
        std::memset(planes + 2 * size, 0, targets * size);
        for (int64_t target = 0; target < targets; ++target) {
            int64_t *top = &corners[2 * target], *left = top + 1;
            *top = uniforms.below(height - h + edge), *left = uniforms.below(width - w + edge);
            paint(planes + (2 + target) * size, end, width, *top, *left, h, w);
            counts[2 + target] = h * w;
        }
        int64_t top, left, kept, failures = 0;
        do {
            if (failures % 20 == 0) {  // after 20 failures, one target fewer
                taken.clear();
                for (int64_t target = 0; target < targets - failures / 20; ++target)
                    taken.set(corners[2 * target], corners[2 * target + 1], h, w);
            }
            top = uniforms.below(height - context_h + edge), left = uniforms.below(width - context_w + edge);
            kept = context_h * context_w - taken.count(top, left, context_h, context_w);
            ++failures;
        } while (kept <= keep);
        taken.set_outside(top, left, context_h, context_w);
        std::memcpy(planes, taken.bytes(), size);
        counts[0] = size - kept;
    }
}

// Plane 1: `count` of the patches that plane 0 does not mask, the first in row-major order, or at random.
extern "C" void gpuaug_cut_context(const Rows* rows, int64_t count, int64_t random) {
    const int64_t size = rows->height * rows->width;
    std::vector<uint16_t> visible(size);
    for (int64_t sample = 0; sample < rows->batch; ++sample) {
        uint8_t* planes = rows->out + sample * rows->planes * size;
        rows->counts[sample * rows->planes + 1] = count;
        if (!random) {
            keep_first(planes, size, count, planes + size);
            continue;
        }
        const int64_t all = list(planes, size, visible.data()), left = all - count;
        Uniforms uniforms(*rows, sample);
        choose(visible.data(), all, std::min(count, left), uniforms);  // those that stay, or those that go
        const int64_t first = count <= left ? 0 : left;
        std::memset(planes + size, 0, size);
        for (int64_t k = first; k < first + count; ++k) planes[size + visible[k]] = 1;
    }
}

// Masks all but `visible` cells of cell x cell patches, chosen at random.
extern "C" void gpuaug_random_masks(const Rows* rows, int64_t cell, int64_t visible) {
    const int64_t width = rows->width, across = width / cell, size = rows->height * width, cells = size / (cell * cell);
    std::vector<uint16_t> numbers(cells);
    for (int64_t sample = 0; sample < rows->batch; ++sample) {
        Uniforms uniforms(*rows, sample);
        uint8_t* mask = rows->out + sample * size;
        for (int64_t k = 0; k < cells; ++k) numbers[k] = static_cast<uint16_t>(k);
        choose(numbers.data(), cells, visible, uniforms);
        std::memset(mask, 1, size);
        for (int64_t k = 0; k < visible && cell == 1; ++k) mask[numbers[k]] = 0;
        for (int64_t k = 0; k < visible && cell > 1; ++k) {
            uint8_t* const corner = mask + (numbers[k] / across * width + numbers[k] % across) * cell;
            for (int64_t y = 0; y < cell; ++y) std::memset(corner + y * width, 0, cell);
        }
        rows->counts[sample] = size - visible * cell * cell;
    }
}
