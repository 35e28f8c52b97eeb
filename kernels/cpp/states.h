// Recurrent states in pages of the pool, and a convolution that goes on from its newest inputs there. The contract is in
// ../recurrence.py.
#pragma once

#include <vector>

#include "team.h"
#include "vectors.h"

namespace motet {

struct StateBatch {  // as many numbers as ../native/recurrence.py writes
    const int32_t* segment_rows;
    int64_t num_sequences;
    const int32_t *sequence_segments, *source, *target;
    int64_t num_state_pages;
    const uint8_t* is_fresh;
};

struct ConvState {  // where the newest inputs of a convolution are in a state
    int64_t page, offset, kernel, num_channels;
};

constexpr int64_t kConvChannels = 4 * kLanes;  // that a thread convolves at once
constexpr int64_t kLeastConvolved = 1 << 15;   // elements; for fewer, a second thread costs more than it saves

// Convolves the channels from `channel` on, `kConvChannels` at most, of all rows of a sequence, and keeps the newest
// inputs of each of its segments. `input(row, channel, count)` is a vector of inputs; `emit(row, channel, count, total)`
// gets the sum of the newest ones times `taps` `[kernel, channels]`, and `bias`.
template <class T, class Input, class Emit>
inline void convolve(const StateBatch& batch, int64_t sequence, const ConvState& at, const float* taps,
                     const float* bias, T* pool, int64_t page_stride, int64_t channel, Input input, Emit emit) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < at.kernel * kConvChannels) memory.resize(size_t(at.kernel * kConvChannels));
    float* const ring = memory.data();  // input i, counted from the oldest that was kept, is at i modulo `kernel`
    const int64_t end = std::min(channel + kConvChannels, at.num_channels), num_kept = at.kernel - 1;
    const auto kept = [&](const int32_t* pages, int64_t index) {
        return pool + pages[index * batch.num_state_pages + at.page] * page_stride + at.offset;
    };
    for (int64_t i = batch.sequence_segments[sequence]; i < batch.sequence_segments[sequence + 1]; i++) {
        const T* before = batch.is_fresh[i] ? nullptr : kept(batch.source, i);
        for (int64_t tap = 0; tap < num_kept; tap++)
            for (int64_t c = channel; c < end; c += kLanes)
                store(ring + tap * kConvChannels + c - channel,
                      before ? load(before + tap * at.num_channels + c, end - c) : Floats{});
        const int64_t first = batch.segment_rows[i], num_rows = batch.segment_rows[i + 1] - first;
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t oldest = row % at.kernel, newest = (row + num_kept) % at.kernel;
            for (int64_t c = channel; c < end; c += kLanes) {
                const int64_t count = end - c;
                const Floats value = input(first + row, c, count);
                store(ring + newest * kConvChannels + c - channel, value);
                Floats total = {};
                int64_t place = oldest;
                for (int64_t tap = 0; tap < num_kept; tap++) {
                    total += load(ring + place * kConvChannels + c - channel) *
                             load(taps + tap * at.num_channels + c, count);
                    place = place + 1 == at.kernel ? 0 : place + 1;
                }
                total += value * load(taps + num_kept * at.num_channels + c, count);
                emit(first + row, c, count, total + load(bias + c, count));
            }
        }
        T* after = kept(batch.target, i);
        for (int64_t tap = 0; tap < num_kept; tap++)
            for (int64_t c = channel; c < end; c += kLanes)
                store(after + tap * at.num_channels + c,
                      load(ring + (num_rows + tap) % at.kernel * kConvChannels + c - channel), end - c);
    }
}

// The same of all channels and sequences, shared by threads.
template <class T, class Input, class Emit>
inline void convolve_all(const StateBatch& batch, int64_t num_rows, const ConvState& at, const float* taps,
                         const float* bias, T* pool, int64_t page_stride, int num_threads, Input input, Emit emit) {
    const int64_t num_blocks = (at.num_channels + kConvChannels - 1) / kConvChannels;
    Team::of_process().share(num_rows * at.num_channels < kLeastConvolved ? 1 : num_threads,
                             num_blocks * batch.num_sequences, [&](int64_t unit) {
                                 convolve(batch, unit / num_blocks, at, taps, bias, pool, page_stride,
                                          unit % num_blocks * kConvChannels, input, emit);
                             });
}

}  // namespace motet
