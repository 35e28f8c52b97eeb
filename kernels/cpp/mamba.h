// Mamba-2 (arXiv 2405.21060): the convolution of u, B and C, the recurrence of each head on its state in pages, the gated
// norm. The contract is in ../mamba.py.
//
// The recurrence is computed token by token: as with Gated DeltaNet a CPU gains nothing in float32 by products of chunks.
// Columns of a state do not depend on each other, so a few of them stay in the L1 cache for many tokens.
#pragma once

#include "rows.h"
#include "states.h"

namespace motet {

struct MambaLayer {  // as many numbers as ../native/recurrence.py writes
    // taps `[kernel, channels]`, the newest row's last; `norm` is null where nothing is normed
    const float *taps, *conv_bias, *decay, *dt_bias, *skip, *norm;
    int64_t kernel, num_heads, num_groups, head_dim, state_size, gates_first;
    double eps, least_step, most_step;
    const int32_t *head_pages, *head_offsets;
    int64_t conv_page, conv_offset;
};

constexpr int64_t kMambaRows = 64;                          // of a segment that are computed together
constexpr int64_t kMambaVectors = kRegister == 16 ? 2 : 1;  // of a state's columns, likewise
constexpr int64_t kWideMamba = 4;                           // of one row's, which are read as they lie in memory
constexpr int64_t kMambaColumns = kMambaVectors * kLanes;
constexpr int64_t kLeastMamba = 1 << 16;  // elements of states; for fewer, a second thread costs more than it saves

// `kVectors` vectors of a state's columns follow a row: to = factor * from + keys changeᵀ, and the sums over keys of that
// times `queries`. Sums have one order however many columns there are, so that a row's result is the same in any segment.
template <int64_t kVectors>
inline void follow_row(const float* from, float* to, int64_t stride, int64_t size, float factor, const float* keys,
                       const float* queries, const Floats* change, Floats* y) {
    Floats sums[kVectors] = {}, steps[kVectors];
    for (int64_t w = 0; w < kVectors; w++) steps[w] = change[w];
    for (int64_t i = 0; i < size; i++)
        for (int64_t w = 0; w < kVectors; w++) {
            const Floats value = load(from + i * stride + w * kLanes) * factor + steps[w] * keys[i];
            store(to + i * stride + w * kLanes, value);
            sums[w] += value * queries[i];
        }
    for (int64_t w = 0; w < kVectors; w++) y[w] = sums[w];
}

// A head of a sequence: all that its segments need, of what was convolved, of states and of the result.
template <class T>
class MambaHead {
  public:
    // `mixed` `[rows, channels]` has u, B and C.
    MambaHead(const MambaLayer& layer, const StateBatch& batch, const T* mixed, const T* steps, int64_t steps_stride,
              T* pool, int64_t page_stride, T* out, int64_t head)
        : layer(layer), batch(batch), mixed(mixed), steps(steps), steps_stride(steps_stride), pool(pool),
          page_stride(page_stride), out(out), head(head), width(layer.num_heads * layer.head_dim),
          num_channels(width + 2 * layer.num_groups * layer.state_size),
          first_b(width + head * layer.num_groups / layer.num_heads * layer.state_size) {
        static thread_local std::vector<float> memory;
        const int64_t num_keys = kMambaRows * layer.state_size;
        const int64_t total = 2 * num_keys + layer.state_size * kMambaColumns + 4 * kLanes;
        if (int64_t(memory.size()) < total) memory.resize(size_t(total));
        b = memory.data(), c = b + num_keys + kLanes, columns = c + num_keys + kLanes;
    }

    void compute(int64_t sequence) const {
        for (int64_t i = batch.sequence_segments[sequence]; i < batch.sequence_segments[sequence + 1]; i++) segment(i);
    }

  private:
    const MambaLayer& layer;
    const StateBatch& batch;
    const T *const mixed, *const steps;
    const int64_t steps_stride;
    T* const pool;
    const int64_t page_stride;
    T* const out;
    const int64_t head, width, num_channels, first_b;
    float *b, *c;    // of some rows
    float* columns;  // of a state

    float* state(const int32_t* pages) const {
        return (float*)(pool + pages[layer.head_pages[head]] * page_stride) + layer.head_offsets[head];
    }

    void segment(int64_t index) const {
        const int64_t start = batch.segment_rows[index], end = batch.segment_rows[index + 1];
        const float* from = batch.is_fresh[index] ? nullptr : state(batch.source + index * batch.num_state_pages);
        float* to = state(batch.target + index * batch.num_state_pages);
        for (int64_t first = start; first < end; first += kMambaRows) {
            follow(from, to, first, std::min(kMambaRows, end - first));
            from = to;
        }
    }

    // From the state `from`, or zeros, to the state `to`, by `count` rows from `first` on.
    void follow(const float* from, float* to, int64_t first, int64_t count) const {
        const int64_t size = layer.state_size, all_states = layer.num_groups * size;
        float factors[kMambaRows], lengths[kMambaRows];
        for (int64_t row = 0; row < count; row++) {
            const T* of_row = mixed + (first + row) * num_channels + first_b;
            for (int64_t i = 0; i < size; i += kLanes) {
                store(b + row * size + i, load(of_row + i, size - i), size - i);
                store(c + row * size + i, load(of_row + all_states + i, size - i), size - i);
            }
            const float step = to_float(steps[(first + row) * steps_stride + head]) + layer.dt_bias[head];
            const float softplus = std::max(step, 0.0f) + std::log1p(std::exp(-std::abs(step)));
            lengths[row] = std::min(std::max(softplus, float(layer.least_step)), float(layer.most_step));
            factors[row] = std::exp(layer.decay[head] * lengths[row]);
        }
        const int64_t stride = layer.head_dim;
        int64_t column = 0;
        for (; count == 1 && from && column + kWideMamba * kLanes <= stride; column += kWideMamba * kLanes)
            compute_row<kWideMamba>(from + column, to + column, stride, first, column, factors[0], lengths[0], b, c);
        for (; column < stride; column += kMambaColumns) {
            const int64_t left = stride - column;
            for (int64_t i = 0; i < size; i++)
                for (int64_t w = 0; w < kMambaColumns; w += kLanes)
                    store(columns + i * kMambaColumns + w,
                          from && w < left ? load(from + i * stride + column + w, left - w) : Floats{});
            for (int64_t row = 0; row < count; row++)
                compute_row<kMambaVectors>(columns, columns, kMambaColumns, first + row, column, factors[row],
                                           lengths[row], b + row * size, c + row * size);
            for (int64_t i = 0; i < size; i++)
                for (int64_t w = 0; w < kMambaColumns && w < left; w += kLanes)
                    store(to + i * stride + column + w, load(columns + i * kMambaColumns + w), left - w);
        }
    }

    // Some columns of the state follow a row, and give theirs of the result.
    template <int64_t kVectors>
    void compute_row(const float* from, float* to, int64_t stride, int64_t row, int64_t column, float factor,
                     float length, const float* keys, const float* queries) const {
        Floats u[kVectors], y[kVectors], change[kVectors];
        const int64_t left = layer.head_dim - column;
        const T* inputs = mixed + row * num_channels + head * layer.head_dim + column;
        for (int64_t w = 0; w < kVectors; w++) {
            u[w] = w * kLanes < left ? load(inputs + w * kLanes, left - w * kLanes) : Floats{};
            change[w] = u[w] * length;
        }
        follow_row<kVectors>(from, to, stride, layer.state_size, factor, keys, queries, change, y);
        T* result = out + row * width + head * layer.head_dim + column;
        for (int64_t w = 0; w < kVectors && w * kLanes < left; w++)
            store(result + w * kLanes, y[w] + u[w] * layer.skip[head], left - w * kLanes);
    }
};

// Gates and norms a row of results in place.
template <class T>
inline void gate_row(const MambaLayer& layer, const T* z, T* y) {
    const int64_t width = layer.num_heads * layer.head_dim / layer.num_groups;
    for (int64_t group = 0; group < layer.num_groups; group++, z += width, y += width) {
        const bool gates_first = layer.gates_first || !layer.norm;
        const auto gated = [&](int64_t i, bool gates) {
            const Floats value = load(y + i, width - i);
            return gates ? value * silu(load(z + i, width - i)) : value;
        };
        if (!layer.norm) {
            for (int64_t i = 0; i < width; i += kLanes) store(y + i, gated(i, true), width - i);
            continue;
        }
        Floats squares = {};
        for (int64_t i = 0; i < width; i += kLanes) {
            const Floats value = gated(i, gates_first);
            squares += value * value;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / float(width) + float(layer.eps));
        const float* weight = layer.norm + group * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const Floats normed = gated(i, gates_first) * scale * load(weight + i, width - i);
            store(y + i, gates_first ? normed : normed * silu(load(z + i, width - i)), width - i);
        }
    }
}

template <class T>
void mamba(const MambaLayer& layer, const StateBatch& batch, const T* x, int64_t x_stride, int64_t num_rows, T* pool,
           int64_t page_stride, T* out, int num_threads) {
    const int64_t width = layer.num_heads * layer.head_dim;
    const int64_t num_channels = width + 2 * layer.num_groups * layer.state_size;
    static thread_local std::vector<T> memory;
    if (int64_t(memory.size()) < num_rows * num_channels) memory.resize(size_t(num_rows * num_channels));
    T* const mixed = memory.data();
    convolve_all(
        batch, num_rows, ConvState{layer.conv_page, layer.conv_offset, layer.kernel, num_channels}, layer.taps,
        layer.conv_bias, pool, page_stride, num_threads,
        [&](int64_t row, int64_t channel, int64_t count) { return load(x + row * x_stride + width + channel, count); },
        [&](int64_t row, int64_t channel, int64_t count, const Floats& total) {
            store(mixed + row * num_channels + channel, silu(rounded<T>(total)), count);
        });
    const int64_t work = num_rows * width * layer.state_size;
    const T* steps = x + width + num_channels;
    Team::of_process().share(
        work < kLeastMamba ? 1 : num_threads, batch.num_sequences * layer.num_heads, [&](int64_t unit) {
            MambaHead<T>(layer, batch, mixed, steps, x_stride, pool, page_stride, out, unit % layer.num_heads)
                .compute(unit / layer.num_heads);
        });
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) gate_row(layer, x + row * x_stride, out + row * width);
    });
}

}  // namespace motet
