// Gated short convolutions of LFM2. The contract is in ../short_convolution.py.
#pragma once

#include "states.h"

namespace motet {

struct ShortConvolutionLayer {  // as many numbers as ../native/recurrence.py writes
    const float *taps, *bias;   // taps `[kernel, channels]`, the newest row's last
    int64_t kernel, num_channels;
    const int32_t *head_pages, *head_offsets;  // of none
    int64_t conv_page, conv_offset;
};

template <class T>
void short_convolution(const ShortConvolutionLayer& layer, const StateBatch& batch, const T* x, int64_t x_stride,
                       int64_t num_rows, T* pool, int64_t page_stride, T* out, int num_threads) {
    const int64_t width = layer.num_channels;
    convolve_all(
        batch, num_rows, ConvState{layer.conv_page, layer.conv_offset, layer.kernel, width}, layer.taps, layer.bias,
        pool, page_stride, num_threads,
        [&](int64_t row, int64_t channel, int64_t count) {
            const T* from = x + row * x_stride + channel;
            return rounded<T>(load(from, count) * load(from + 2 * width, count));
        },
        [&](int64_t row, int64_t channel, int64_t count, const Floats& total) {
            const Floats gates = load(x + row * x_stride + width + channel, count);
            store(out + row * width + channel, gates * rounded<T>(total), count);
        });
}

}  // namespace motet
