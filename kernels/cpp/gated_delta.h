// Gated DeltaNet (arXiv 2412.06464): the convolution of q, k and v, the delta rule on states in pages, the gated norm. The
// contract is in ../gated_delta.py.
//
// The rule is computed token by token. Its form by chunks (arXiv 2406.06484) makes matrix products of it, and takes more
// operations for that: in float32 a CPU gains nothing by it. Columns of a state do not depend on each other, so a few of
// them stay in the L1 cache for many tokens, and are read and written once for each.
#pragma once

#include "states.h"

namespace motet {

struct DeltaLayer {                              // as many numbers as ../native/recurrence.py writes
    const float *taps, *decay, *dt_bias, *norm;  // taps `[kernel, channels]`, the newest row's last
    int64_t kernel, num_key_heads, num_value_heads, key_dim, value_dim;
    double eps;
    const int32_t *head_pages, *head_offsets;
    int64_t conv_page, conv_offset;
};

constexpr int64_t kDeltaRows = 64;  // of a segment that are computed head by head
// Vectors of a state's columns that are computed together: of many rows, so that they stay in the L1 cache, and of one row,
// so that memory is read as it lies.
constexpr int64_t kDeltaVectors = kRegister == 16 ? 2 : 1;
constexpr int64_t kWideVectors = 8;
constexpr int64_t kDeltaColumns = kDeltaVectors * kLanes;
constexpr int64_t kLeastDelta = 1 << 16;  // elements of states; for fewer, a second thread costs more than it saves

// One sweep over `kVectors` vectors of a state's columns: to = decay * from + k dᵀ, then the sums over keys of that times
// `next_k` and `next_q`. Sums have one order whichever of both is wanted and however many columns there are, so that a
// row's result is the same in any segment.
template <int64_t kVectors, bool kUpdates, bool kReads>
inline void sweep(const float* from, float* to, int64_t stride, int64_t key_dim, float decay, const float* k,
                  const Floats* d, const float* next_k, const float* next_q, Floats* of_k, Floats* of_q) {
    Floats keys[kVectors] = {}, queries[kVectors] = {};
    for (int64_t i = 0; i < key_dim; i++)
        for (int64_t w = 0; w < kVectors; w++) {
            Floats value = load(from + i * stride + w * kLanes);
            if constexpr (kUpdates) {
                value = value * decay + d[w] * k[i];
                store(to + i * stride + w * kLanes, value);
            }
            if constexpr (kReads) {
                keys[w] += value * next_k[i];
                queries[w] += value * next_q[i];
            }
        }
    if constexpr (kReads)
        for (int64_t w = 0; w < kVectors; w++) of_k[w] = keys[w], of_q[w] = queries[w];
}

struct DeltaScalars {  // of a value head, for each row
    float decays[kDeltaRows], betas[kDeltaRows];
    float of_both[kDeltaRows];  // k times q
};

// A key head of a sequence, with its value heads: all that their segments need, of x, of states and of the result.
template <class T>
class DeltaHeads {
  public:
    DeltaHeads(const DeltaLayer& layer, const StateBatch& batch, const T* x, int64_t x_stride, T* pool,
               int64_t page_stride, T* out, int64_t key_head)
        : layer(layer), batch(batch), x(x), x_stride(x_stride), pool(pool), page_stride(page_stride), out(out),
          per_key(layer.num_value_heads / layer.num_key_heads), first_head(key_head * per_key), kept(layer.kernel - 1),
          first_v(2 * layer.num_key_heads * layer.key_dim),
          num_channels(first_v + layer.num_value_heads * layer.value_dim), first_z(num_channels),
          first_b(first_z + layer.num_value_heads * layer.value_dim), first_q(key_head * layer.key_dim),
          padded((layer.value_dim + kDeltaColumns - 1) / kDeltaColumns * kDeltaColumns) {
        static thread_local std::vector<float> memory;
        const int64_t sizes[] = {kDeltaRows * layer.key_dim, kDeltaRows * layer.key_dim, kDeltaRows * per_key * padded,
                                 kDeltaRows * padded, layer.key_dim * kDeltaColumns};
        int64_t total = 0;
        for (int64_t size : sizes) total += size + kLanes;
        if (int64_t(memory.size()) < total) memory.resize(size_t(total));
        float** const parts[] = {&q, &k, &v, &o, &columns};
        float* at = memory.data();
        for (int i = 0; i < 5; i++) *parts[i] = at, at += sizes[i] + kLanes;
    }

    void compute(int64_t sequence) {
        for (int64_t i = batch.sequence_segments[sequence]; i < batch.sequence_segments[sequence + 1]; i++) segment(i);
    }

  private:
    const DeltaLayer& layer;
    const StateBatch& batch;
    const T* const x;
    const int64_t x_stride;
    T* const pool;
    const int64_t page_stride;
    T* const out;
    const int64_t per_key, first_head, kept, first_v, num_channels, first_z, first_b, first_q;
    const int64_t padded;  // columns of v and o for a head: whole vectors
    float *q, *k, *v, *o;  // of some rows; v of all value heads, o of one
    float* columns;        // of a state

    float* state(const int32_t* pages, int64_t head) const {
        return (float*)(pool + pages[layer.head_pages[head]] * page_stride) + layer.head_offsets[head];
    }
    T* conv_state(const int32_t* pages) const {
        return pool + pages[layer.conv_page] * page_stride + layer.conv_offset;
    }

    void segment(int64_t index) {
        const int64_t start = batch.segment_rows[index], end = batch.segment_rows[index + 1];
        const bool is_fresh = batch.is_fresh[index];
        const int32_t* source = batch.source + index * batch.num_state_pages;
        const int32_t* target = batch.target + index * batch.num_state_pages;
        const T* before = is_fresh ? nullptr : conv_state(source);
        for (int64_t first = start; first < end; first += kDeltaRows) {
            const int64_t count = std::min(kDeltaRows, end - first);
            convolve(before, start, first, count);
            for (int64_t head = 0; head < per_key; head++) {
                const int32_t* pages = first == start ? source : target;
                const bool is_zero = first == start && is_fresh;
                apply_rule(is_zero ? nullptr : state(pages, first_head + head), state(target, first_head + head), head,
                           first, count);
                gate(head, first, count);
            }
        }
        keep(before, start, end, conv_state(target));
    }

    // The inputs of the convolution in a row of a segment that begins at `start`, or in one before; null: zeros.
    const T* input(const T* before, int64_t start, int64_t row) const {
        if (row >= start) return x + row * x_stride;
        return before ? before + (row - start + kept) * num_channels : nullptr;
    }

    void convolve(const T* before, int64_t start, int64_t first, int64_t count) const {
        for (int64_t row = first; row < first + count; row++) {
            const int64_t at = row - first, dim = layer.key_dim;
            convolve(before, start, row, first_q, dim, q + at * dim);
            convolve(before, start, row, layer.num_key_heads * dim + first_q, dim, k + at * dim);
            to_length(q + at * dim, 1.0f / std::sqrt(float(dim)));
            to_length(k + at * dim, 1.0f);
            for (int64_t head = 0; head < per_key; head++)
                convolve(before, start, row, first_v + (first_head + head) * layer.value_dim, layer.value_dim,
                         v + (at * per_key + head) * padded);
        }
    }

    void convolve(const T* before, int64_t start, int64_t row, int64_t channel, int64_t width, float* to) const {
        for (int64_t i = 0; i < width; i += kLanes) {
            Floats total = {};
            for (int64_t tap = 0; tap <= kept; tap++)
                if (const T* from = input(before, start, row - kept + tap))
                    total += load(from + channel + i, width - i) *
                             load(layer.taps + tap * num_channels + channel + i, width - i);
            total = rounded<T>(total);
            store(to + i, rounded<T>(total / (1.0f + exponential(-total))), width - i);
        }
    }

    void to_length(float* head, float length) const {
        const float scale = length / std::sqrt(dot(head, head) + 1e-6f);
        for (int64_t i = 0; i < layer.key_dim; i += kLanes)
            store(head + i, load(head + i, layer.key_dim - i) * scale, layer.key_dim - i);
    }

    float dot(const float* one, const float* other) const {
        Floats total = {};
        for (int64_t i = 0; i < layer.key_dim; i += kLanes)
            total += load(one + i, layer.key_dim - i) * load(other + i, layer.key_dim - i);
        return sum(total);
    }

    // From the state `from`, or zeros, to the state `to`, by `count` rows from `first` on; fills o.
    void apply_rule(const float* from, float* to, int64_t head, int64_t first, int64_t count) const {
        DeltaScalars scalars;
        const int64_t dim = layer.key_dim, own = first_head + head;
        for (int64_t row = 0; row < count; row++) {
            const T* of_row = x + (first + row) * x_stride + first_b + own;
            const float step = to_float(of_row[layer.num_value_heads]) + layer.dt_bias[own];
            const float softplus = std::max(step, 0.0f) + std::log1p(std::exp(-std::abs(step)));
            T beta;
            assign(beta, 1.0f / (1.0f + std::exp(-to_float(of_row[0]))));
            scalars.decays[row] = std::exp(layer.decay[own] * softplus), scalars.betas[row] = to_float(beta);
            scalars.of_both[row] = dot(k + row * dim, q + row * dim);
        }
        const bool is_wide = count == 1 && from && layer.value_dim % (kWideVectors * kLanes) == 0;
        for (int64_t column = 0; column < layer.value_dim;) {
            if (is_wide) {
                follow<kWideVectors>(from + column, to + column, layer.value_dim, head, column, 1, scalars);
                column += kWideVectors * kLanes;
                continue;
            }
            const int64_t width = layer.value_dim - column;
            read_columns(from, column, width);
            follow<kDeltaVectors>(columns, columns, kDeltaColumns, head, column, count, scalars);
            for (int64_t i = 0; i < dim; i++)
                for (int64_t w = 0; w < kDeltaColumns && w < width; w += kLanes)
                    store(to + i * layer.value_dim + column + w, load(columns + i * kDeltaColumns + w), width - w);
            column += kDeltaColumns;
        }
    }

    // Some columns of a head's state follow `count` rows; fills these columns of o.
    template <int64_t kVectors>
    void follow(const float* from, float* to, int64_t stride, int64_t head, int64_t column, int64_t count,
                const DeltaScalars& scalars) const {
        const int64_t dim = layer.key_dim;
        Floats of_k[kVectors], of_q[kVectors], d[kVectors];
        sweep<kVectors, false, true>(from, to, stride, dim, 0, nullptr, nullptr, k, q, of_k, of_q);
        for (int64_t row = 0; row < count; row++) {
            const float decay = scalars.decays[row], beta = scalars.betas[row], of_both = scalars.of_both[row];
            for (int64_t w = 0; w < kVectors; w++) {
                const int64_t at = column + w * kLanes;
                d[w] = (load(v + (row * per_key + head) * padded + at) - of_k[w] * decay) * beta;
                store(o + row * padded + at, of_q[w] * decay + d[w] * of_both);
            }
            const float *now = k + row * dim, *next_k = now + dim, *next_q = q + (row + 1) * dim;
            if (row + 1 < count)
                sweep<kVectors, true, true>(from, to, stride, dim, decay, now, d, next_k, next_q, of_k, of_q);
            else
                sweep<kVectors, true, false>(from, to, stride, dim, decay, now, d, nullptr, nullptr, nullptr, nullptr);
        }
    }

    void read_columns(const float* from, int64_t column, int64_t width) const {
        for (int64_t i = 0; i < layer.key_dim; i++)
            for (int64_t w = 0; w < kDeltaColumns; w += kLanes)
                store(columns + i * kDeltaColumns + w,
                      from && w < width ? load(from + i * layer.value_dim + column + w, width - w) : Floats{});
    }

    // Norms o and multiplies it by silu(z).
    void gate(int64_t head, int64_t first, int64_t count) const {
        const int64_t dim = layer.value_dim, column = (first_head + head) * dim;
        for (int64_t row = 0; row < count; row++) {
            float* from = o + row * padded;
            Floats squares = {};
            for (int64_t i = 0; i < dim; i += kLanes) {
                const Floats value = rounded<T>(load(from + i, dim - i));
                store(from + i, value, dim - i);
                squares += value * value;
            }
            const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + float(layer.eps));
            const T* z = x + (first + row) * x_stride + first_z + column;
            T* to = out + (first + row) * layer.num_value_heads * dim + column;
            for (int64_t i = 0; i < dim; i += kLanes) {
                const Floats normed = rounded<T>(load(from + i, dim - i) * scale), gates = load(z + i, dim - i);
                const Floats weighted = rounded<T>(normed * load(layer.norm + i, dim - i));
                store(to + i, weighted * (gates / (1.0f + exponential(-gates))), dim - i);
            }
        }
    }

    // Writes the newest inputs of these heads' convolution, oldest first; `to` may be `before`.
    void keep(const T* before, int64_t start, int64_t end, T* to) const {
        for (int64_t i = 0; i < kept; i++) {
            const T* from = input(before, start, end - kept + i);
            const auto copy = [&](int64_t channel, int64_t width) {
                T* place = to + i * num_channels + channel;
                if (from)
                    std::memcpy(place, from + channel, size_t(width) * sizeof(T));
                else
                    std::memset(place, 0, size_t(width) * sizeof(T));
            };
            copy(first_q, layer.key_dim);
            copy(layer.num_key_heads * layer.key_dim + first_q, layer.key_dim);
            copy(first_v + first_head * layer.value_dim, per_key * layer.value_dim);
        }
    }
};

// Threads share the key heads of all sequences, head by head, so that a head's taps stay in the cache.
template <class T>
void gated_delta(const DeltaLayer& layer, const StateBatch& batch, const T* x, int64_t x_stride, int64_t num_rows,
                 T* pool, int64_t page_stride, T* out, int num_threads) {
    const int64_t work = num_rows * layer.num_value_heads * layer.key_dim * layer.value_dim;
    Team::of_process().share(
        work < kLeastDelta ? 1 : num_threads, batch.num_sequences * layer.num_key_heads, [&](int64_t unit) {
            DeltaHeads<T>(layer, batch, x, x_stride, pool, page_stride, out, unit / batch.num_sequences)
                .compute(unit % batch.num_sequences);
        });
}

}  // namespace motet
