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

// Sets the registers: tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. `num_rows`: of tiles 0, 1 and 4, and
// of 2, 3 and 5.
inline void configure_tiles(int num_rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = uint8_t(num_rows);
    config.rows[6] = config.rows[7] = uint8_t(kTilePairs);
    _tile_loadconfig(&config);
}
#endif

}  // namespace motet
