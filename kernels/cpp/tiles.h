// Matrix instructions (AMX): products of tiles of 16 rows, 32 inputs and 16 outputs in bfloat16.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(MOTET_BF16_PRODUCTS) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MOTET_TILES 1
#endif

namespace motet {

// Whether tiles may be used here: Linux gives their registers to a process that asks for them.
inline bool tiles_are_allowed() {
#ifdef MOTET_TILES
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
#else
    return false;
#endif
}

#ifdef MOTET_TILES
constexpr int64_t kTileInputs = 32, kTilePairs = 16;  // inputs of a tile, and pairs of them

// Instructions on tiles read memory that GCC 12 does not know they read: what was stored must be there before them.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Sets the registers: tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. `num_rows`: of tiles 0 to 5.
inline void configure_tiles(int num_rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = uint8_t(num_rows);
    config.rows[6] = config.rows[7] = uint8_t(kTilePairs);
    finish_stores();
    _tile_loadconfig(&config);
}

template <int kCount>
inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kCount == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Adds the products of `kCount` tiles of rows with two tiles of weights to the sums. Strides are in bytes.
template <int kCount>
inline void add_products(const void* first, const void* last, int64_t stride, const void* left, const void* right,
                         int64_t weight_stride) {
    _tile_loadd(6, left, weight_stride);
    _tile_loadd(7, right, weight_stride);
    _tile_loadd(4, first, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kCount == 2) {
        _tile_loadd(5, last, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// The sums of a tile of rows are `[rows, 32]` at `first`, those of another one at `last`. The stride is in bytes.
template <int kCount>
inline void load_sums(const float* first, const float* last, int64_t stride) {
    _tile_loadd(0, first, stride);
    _tile_loadd(1, first + kLanes, stride);
    if constexpr (kCount == 2) {
        _tile_loadd(2, last, stride);
        _tile_loadd(3, last + kLanes, stride);
    }
}

template <int kCount>
inline void store_sums(float* first, float* last, int64_t stride) {
    _tile_stored(0, first, stride);
    _tile_stored(1, first + kLanes, stride);
    if constexpr (kCount == 2) {
        _tile_stored(2, last, stride);
        _tile_stored(3, last + kLanes, stride);
    }
}
#endif

}  // namespace motet
