// Kernels that compute each row by itself: rotary embedding with the KV write, norms, gated activations.
#pragma once

#include "team.h"
#include "vectors.h"

namespace motet {

constexpr int64_t kLeastShared = 1 << 14;  // elements; for fewer, a second thread costs more than it saves

// Calls `compute(start, end)` with ranges of rows, which threads share.
template <class F>
void share_rows(int64_t num_rows, int64_t width, int num_threads, F compute) {
    const int64_t blocks = num_rows * width < kLeastShared ? 1 : blocks_of(num_rows, num_threads);
    share_ranges(num_rows, blocks, num_threads, compute);
}

// Rotates one head by the angles of a position; element i is rotated with element i + dim / 2, as in Llama.
template <class T>
inline void rotate(const T* from, const float* cosines, const float* sines, int64_t dim, T* to) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d += kLanes) {
        const int64_t count = half - d;
        Floats first = load(from + d, count), second = load(from + half + d, count);
        Floats cosine = load(cosines + d, count), sine = load(sines + d, count);
        store(to + d, first * cosine - second * sine, count);
        store(to + half + d, second * cosine + first * sine, count);
    }
}

// Rotates q into `q_out` `[rows, heads, dim]` and k into its pages; copies v into its pages. A position has 2 or 4 sides
// of angles: the last two are those of q.
template <class T>
void write_kv(const T* q, const T* k, const T* v, const float* rotary, T* kv, const int64_t* positions,
              const int64_t* row_pages, const int64_t* row_slots, T* q_out, const int64_t* sizes, int num_threads) {
    const int64_t num_rows = sizes[0], num_heads = sizes[1], num_kv_heads = sizes[2], dim = sizes[3];
    const int64_t q_row = sizes[4], q_head = sizes[5], k_row = sizes[6], k_head = sizes[7], v_row = sizes[8];
    const int64_t v_head = sizes[9], page_stride = sizes[10], v_offset = sizes[11], slot_stride = sizes[12];
    const int64_t angles = sizes[13] * dim / 2;  // of a position
    const int64_t num_v_heads = sizes[14];       // as many as of k, or none
    share_rows(num_rows, (num_heads + num_kv_heads) * dim, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const float *cosines = rotary + positions[row] * angles, *sines = cosines + dim / 2;
            const float *q_cosines = cosines + angles - dim, *q_sines = q_cosines + dim / 2;
            for (int64_t head = 0; head < num_heads; head++)
                rotate(q + row * q_row + head * q_head, q_cosines, q_sines, dim,
                       q_out + (row * num_heads + head) * dim);
            T* to = kv + row_pages[row] * page_stride + row_slots[row] * slot_stride;
            for (int64_t head = 0; head < num_kv_heads; head++)
                rotate(k + row * k_row + head * k_head, cosines, sines, dim, to + head * dim);
            for (int64_t head = 0; head < num_v_heads; head++)
                std::memcpy(to + v_offset + head * dim, v + row * v_row + head * v_head, size_t(dim) * sizeof(T));
        }
    });
}

// The sum of the squares of a row's elements less their mean.
template <class T>
inline float squares_about(float mean, const T* row, int64_t width) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Floats apart = load(row + i) - mean;
        squares += apart * apart;
    }
    float total = sum(squares);
    for (; i < width; i++) total += (to_float(row[i]) - mean) * (to_float(row[i]) - mean);
    return total;
}

// total = x + residual; normed = weight * total over its root mean square, or, if it is centred, of total less its mean.
// Without a residual total is x and is not written. W is the weight's type, to which the normed row is rounded before
// the product.
template <bool kCentred, class T, class W>
void add_norm(const T* x, int64_t x_stride, const T* residual, const W* weight, T* total, T* normed, int64_t num_rows,
              int64_t width, float eps, int num_threads) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const T* from = x + row * x_stride;
            Floats sums = {};  // of squares, or, of a centred norm, of elements
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i;
                Floats value = load(from + i, count);
                if (residual) {
                    value = rounded<T>(value + load(residual + row * width + i, count));
                    store(total + row * width + i, value, count);
                }
                sums += kCentred ? value : value * value;
            }
            if (residual) from = total + row * width;
            const float mean = kCentred ? sum(sums) / float(width) : 0.0f;
            const float squares = kCentred ? squares_about(mean, from, width) : sum(sums);
            const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i;
                Floats value = load(from + i, count);
                if constexpr (kCentred) value = value - mean;
                value = rounded<W>(value * scale);
                store(normed + row * width + i, value * load(weight + i, count), count);
            }
        }
    });
}

// to = (to + x) * scale; the sum is rounded before the product, as in torch.
template <class T>
void add_rows(const T* x, T* to, int64_t num_rows, int64_t width, float scale, int num_threads) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t i = start * width; i < end * width; i += kLanes) {
            const int64_t count = end * width - i;
            store(to + i, rounded<T>(load(x + i, count) + load(to + i, count)) * scale, count);
        }
    });
}

// x = x * weight + bias in place, of some columns of each row; null: none.
template <class T>
void affine(T* x, int64_t stride, const float* weight, const float* bias, int64_t num_rows, int64_t width,
            int num_threads) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++)
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i;
                T* at = x + row * stride + i;
                Floats value = load(at, count);
                if (weight) value = value * load(weight + i, count);
                if (bias) value = value + load(bias + i, count);
                store(at, value, count);
            }
    });
}

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

inline Floats gelu_pytorch_tanh(Floats x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// X(activation, NAME, T) for each of `ACTIVATIONS` in ../norms.py, computed by the function of its name.
#define MOTET_ACTIVATIONS(X, NAME, T) X(silu, NAME, T) X(gelu_pytorch_tanh, NAME, T)

template <class T>
using GatedKernel = void(const T* gate_up, int64_t stride, T* to, int64_t num_rows, int64_t width, int num_threads);

// `compute(gate, up)` of the columns of `[rows, 2 * width]`, gate first.
template <class T, class F>
inline void gated_rows(const T* gate_up, int64_t stride, T* to, int64_t num_rows, int64_t width, int num_threads,
                       F compute) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++) {
            const T *gate = gate_up + row * stride, *up = gate + width;
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i;
                store(to + row * width + i, compute(load(gate + i, count), load(up + i, count)), count);
            }
        }
    });
}

// to = x * sigmoid(gate); the gate is rounded before the product, as in torch.
template <class T>
void multiply_gate(const T* x, const T* gates, int64_t gate_stride, T* to, int64_t num_rows, int64_t width,
                   int num_threads) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t row = start; row < end; row++)
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t count = width - i, at = row * width + i;
                const Floats gate = 1.0f / (1.0f + exponential(-load(gates + row * gate_stride + i, count)));
                store(to + at, load(x + at, count) * rounded<T>(gate), count);
            }
    });
}

inline Floats squared_relu(Floats x) {
    const Floats positive = larger(broadcast(0.0f), x);  // in this order NaN stays
    return positive * positive;
}

// to = compute(x), of each element.
template <class T, class F>
inline void map_rows(const T* x, T* to, int64_t num_rows, int64_t width, int num_threads, F compute) {
    share_rows(num_rows, width, num_threads, [&](int64_t start, int64_t end) {
        for (int64_t i = start * width; i < end * width; i += kLanes) {
            const int64_t count = end * width - i;
            store(to + i, compute(load(x + i, count)), count);
        }
    });
}

// `xielu` of ../norms.py.
struct Xielu {
    float positive, negative, slope, limit;
    FloatPart operator()(FloatPart x) const {
        const FloatPart low = -larger(FloatPart{} - limit, -x);  // in this order NaN stays
        const FloatPart above = positive * x * x, below = (exponential(low) - 1.0f - x) * negative;
        return (x > 0.0f ? above : below) + slope * x;
    }
    template <class V>
    Two<V> operator()(const Two<V>& x) const {
        return {(*this)(x.low), (*this)(x.high)};
    }
};

enum class Ungated : int64_t { kSquaredRelu, kSilu, kGelu, kXielu };  // in the order of `UNGATED` in ../norms.py

template <class T>
void activate(Ungated kind, const double* parameters, const T* x, T* to, int64_t num_rows, int64_t width,
              int num_threads) {
    const auto with = [&](auto compute) { map_rows(x, to, num_rows, width, num_threads, compute); };
    switch (kind) {
        case Ungated::kSquaredRelu:
            return with([](Floats value) { return squared_relu(value); });
        case Ungated::kSilu:
            return with([](Floats value) { return silu(value); });
        case Ungated::kGelu:
            return with([](Floats value) { return gelu_pytorch_tanh(value); });
        case Ungated::kXielu:
            return with(Xielu{float(parameters[0]), float(parameters[1]), float(parameters[2]), float(parameters[3])});
    }
}

// activation(gate) * up. The activation is rounded before the product, as in torch.
template <class T, Floats (*kActivation)(Floats)>
void gated(const T* gate_up, int64_t stride, T* to, int64_t num_rows, int64_t width, int num_threads) {
    gated_rows(gate_up, stride, to, num_rows, width, num_threads,
               [](Floats gate, Floats up) { return rounded<T>(kActivation(gate)) * up; });
}

// `ClampedSwiglu` of ../norms.py; what is multiplied last is rounded before.
template <class T>
void clamped_swiglu(const T* gate_up, int64_t stride, T* to, int64_t num_rows, int64_t width, float alpha, float limit,
                    int num_threads) {
    const Floats top = broadcast(limit);
    gated_rows(gate_up, stride, to, num_rows, width, num_threads, [&](Floats gate, Floats up) {
        gate = -larger(-top, -gate), up = -larger(-top, -larger(-top, up));  // in this order NaN stays
        return rounded<T>(gate / (1.0f + exponential(-alpha * gate))) * rounded<T>(up + 1.0f);
    });
}

}  // namespace motet
