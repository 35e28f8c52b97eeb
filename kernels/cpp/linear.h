// Linear layers, on weights in a layout of their own (packed by ../native/linear.py).
//
// Packed weights are panels. A panel holds a few vectors of outputs: for the first `kDepth` inputs the weights of all
// its outputs, then for the next `kDepth` inputs, and so on. So weights are read in order, once for a few rows of x,
// and each element of x is multiplied with whole vectors of outputs. The sums of a row run over its inputs in order, so
// that its result is the same to the last bit for any number of rows and threads.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace motet {

// The weights of 16 outputs for the inputs that the CPU multiplies at once.
template <class T>
struct Outputs {
    static constexpr int64_t kDepth = 1;  // inputs
    typedef float Input;                  // to what the elements of x are converted
    Floats value;
    explicit Outputs(const T* from) : value(load(from)) {}
    void add_to(Floats& sum, const Input* x) const { sum += value * *x; }
};

#ifdef MOTET_BF16_PRODUCTS
template <>
struct Outputs<Bfloat16> {
    static constexpr int64_t kDepth = 2;
    typedef Bfloat16 Input;
    __m512bh value;
    explicit Outputs(const Bfloat16* from) : value((__m512bh)_mm512_loadu_si512(from)) {}
    void add_to(Floats& sum, const Input* x) const {
        int both;
        std::memcpy(&both, x, sizeof both);
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), value);
    }
};
#endif

#ifdef __AVX512F__
constexpr int kPanel = 4;                 // vectors of 16 outputs
constexpr int64_t kNearInputs = 1 << 20;  // elements of x that are multiplied with all weights before the next ones
#else
constexpr int kPanel = 1;  // registers hold the sums of six rows and one vector
constexpr int64_t kNearInputs = 1 << 17;
#endif
constexpr int kTileRows = 6;         // rows at once
constexpr int64_t kLeastBlock = 24;  // the fewest rows of a block, even of very wide ones

template <class T>
struct LinearCall {
    const typename Outputs<T>::Input* x;
    const T *weight, *bias;  // no bias: null
    T* y;
    int64_t x_stride, y_stride, num_in, num_out;  // elements
};

// Computes `kRows` rows and `kVectors` vectors of outputs, from vector `first` on, which lie in one panel. The sums
// stay in registers.
template <class T, int kRows, int kVectors>
void linear_tile(const LinearCall<T>& call, int64_t row, int64_t first) {
    typedef Outputs<T> Weights;
    constexpr int64_t kDepth = Weights::kDepth, kWidth = kLanes * kDepth;
    const int64_t steps = (call.num_in + kDepth - 1) / kDepth, whole = call.num_in / kDepth;
    const T* weight = call.weight + ((first / kPanel) * steps * kPanel + first % kPanel) * kWidth;
    const auto* x = call.x + row * call.x_stride;
    Floats sums[kRows][kVectors];
    for (int m = 0; m < kRows; m++)
        for (int v = 0; v < kVectors; v++) sums[m][v] = Floats{};  // one by one: GCC clears a whole array in memory
    for (int64_t step = 0; step < whole; step++, weight += kPanel * kWidth)
        for (int v = 0; v < kVectors; v++) {
            const Weights outputs(weight + v * kWidth);
            for (int m = 0; m < kRows; m++) outputs.add_to(sums[m][v], x + m * call.x_stride + step * kDepth);
        }
    if (whole < steps)  // fewer than `kDepth` inputs are left
        for (int m = 0; m < kRows; m++) {
            typename Weights::Input last[kDepth] = {};
            std::copy_n(x + m * call.x_stride + whole * kDepth, call.num_in % kDepth, last);
            for (int v = 0; v < kVectors; v++) Weights(weight + v * kWidth).add_to(sums[m][v], last);
        }
    for (int v = 0; v < kVectors; v++) {
        const int64_t column = (first + v) * kLanes, count = call.num_out - column;
        if (count <= 0) return;
        const Floats bias = call.bias ? load(call.bias + column, count) : Floats{};
        for (int m = 0; m < kRows; m++) store(call.y + (row + m) * call.y_stride + column, sums[m][v] + bias, count);
    }
}

// Computes `kRows` rows, and vectors `first` to `end` of outputs, which lie in one panel.
template <class T, int kRows>
void linear_rows(const LinearCall<T>& call, int64_t row, int64_t first, int64_t end) {
    if (end - first == kPanel) return linear_tile<T, kRows, kPanel>(call, row, first);
    for (; first < end; first++) linear_tile<T, kRows, 1>(call, row, first);  // a panel that threads share
}

// Computes the last `num_rows` rows, which are at most `kRows`.
template <class T, int kRows>
void linear_rest(const LinearCall<T>& call, int64_t num_rows, int64_t row, int64_t first, int64_t end) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows)
            linear_rows<T, kRows>(call, row, first, end);
        else
            linear_rest<T, kRows - 1>(call, num_rows, row, first, end);
    }
}

// Computes a block of rows on one thread, for vectors `start` to `stop` of outputs.
template <class T>
void linear_block(const LinearCall<T>& call, int64_t num_rows, int64_t start, int64_t stop) {
    for (int64_t first = start; first < stop;) {
        const int64_t end = std::min(stop, (first / kPanel + 1) * kPanel);
        int64_t row = 0;
        for (; row + kTileRows <= num_rows; row += kTileRows) linear_rows<T, kTileRows>(call, row, first, end);
        linear_rest<T, kTileRows - 1>(call, num_rows - row, row, first, end);
        first = end;
    }
}

// `num_rows` rows of x with the elements that `Outputs` takes: x itself, or a converted copy in `spare`. Sets `stride`
// to that of the rows returned.
template <class T>
inline const T* inputs_of(const T* x, int64_t&, int64_t, int64_t, std::vector<T>&) {
    return x;
}

inline const float* inputs_of(const Bfloat16* x, int64_t& stride, int64_t num_rows, int64_t width,
                              std::vector<float>& spare) {
    const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
    if (int64_t(spare.size()) < num_rows * padded) spare.resize(size_t(num_rows * padded));
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < width; i += kLanes)
            store(spare.data() + row * padded + i, load(x + row * stride + i, width - i));
    stride = padded;
    return spare.data();
}

// Computes one thread's part of the outputs, in blocks of rows.
template <class T>
void linear_share(const T* x, int64_t x_stride, int64_t num_rows, const LinearCall<T>& call, int64_t thread,
                  int64_t num_threads) {
    static thread_local std::vector<typename Outputs<T>::Input> spare;
    const int64_t num_vectors = (call.num_out + kLanes - 1) / kLanes;
    const int64_t start = num_vectors * thread / num_threads, stop = num_vectors * (thread + 1) / num_threads;
    const int64_t most = std::max(kLeastBlock, kNearInputs / std::max<int64_t>(1, call.num_in) / kTileRows * kTileRows);
    for (int64_t block = 0; block < num_rows; block += most) {
        const int64_t rows = std::min(num_rows - block, most);
        LinearCall<T> own = call;
        own.x_stride = x_stride, own.y = call.y + block * call.y_stride;
        own.x = inputs_of(x + block * x_stride, own.x_stride, rows, call.num_in, spare);
        linear_block(own, rows, start, stop);
    }
}

// y = x Wᵀ + bias for groups of rows, each with a weight of its own: group g has rows `offsets[g]` to `offsets[g + 1]`,
// and its weight begins at `g * weight_stride`. Threads share the outputs.
template <class T>
void linear(const T* x, int64_t x_stride, const int64_t* offsets, int64_t num_groups, LinearCall<T> call,
            int64_t weight_stride, [[maybe_unused]] int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        int64_t thread = 0, count = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(), count = omp_get_num_threads();
#endif
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t first = offsets[group], num_rows = offsets[group + 1] - first;
            LinearCall<T> own = call;
            own.weight += group * weight_stride, own.y += first * call.y_stride;
            linear_share(x + first * x_stride, x_stride, num_rows, own, thread, count);
        }
    }
}

// Whether these are the fastest linears for this CPU. With matrix instructions (AMX) oneDNN is faster in
// bfloat16.
template <class T>
constexpr bool linear_is_best() {
#ifdef __AMX_BF16__
    return !std::is_same<T, Bfloat16>::value;
#else
    return true;
#endif
}

}  // namespace motet
