// The native CPU kernels behind a plain C ABI: pointers and int64 only, so that it builds in seconds and ctypes loads
// it.
//
// Each kernel is there for float32 and for bfloat16; the contracts are in ../attention.py, ../lora.py and so on. Sizes,
// strides and offsets are in elements; the Python side (../native/) has checked them.

#include "attention.h"
#include "four_bits.h"
#include "gated_delta.h"
#include "linear.h"
#include "lora.h"
#include "mamba.h"
#include "rows.h"
#include "sampling.h"
#include "short_convolution.h"
#include "step.h"

using namespace motet;

namespace {

template <class T>
void attention(const void* q, void* out, const void* kv, const int64_t* query_starts, const int64_t* context_lens,
               const int32_t* pages, const int64_t* page_starts, const int64_t* sizes, const float* sinks, float scale,
               float softcap, int num_threads) {
    const AttentionCall<T> call{(const T*)q, (T*)out,  (const T*)kv, query_starts, context_lens, pages,    page_starts,
                                sizes[0],    sizes[1], sizes[2],     sizes[3],     sizes[4],     sizes[5], sizes[6],
                                sizes[7],    sizes[8], sizes[9],     scale,        sizes[10],    softcap,  sinks};
    attend_all(call, num_threads);
}

}  // namespace

#define MOTET_CALL extern "C" __attribute__((visibility("default")))  // all other symbols are hidden

#define MOTET_GATED(ACTIVATION, NAME, T)                                                                   \
    MOTET_CALL void gated_##ACTIVATION##_##NAME(const T* gate_up, int64_t stride, T* to, int64_t num_rows, \
                                                int64_t width, int num_threads) {                          \
        gated<T, ACTIVATION>(gate_up, stride, to, num_rows, width, num_threads);                           \
    }

#define MOTET_RECURRENCE(RULE, LAYER, NAME, T)                                                               \
    MOTET_CALL void RULE##_##NAME(const void* layer, const void* batch, const T* x, int64_t x_stride,        \
                                  int64_t num_rows, T* pool, int64_t page_stride, T* out, int num_threads) { \
        RULE(*(const LAYER*)layer, *(const StateBatch*)batch, x, x_stride, num_rows, pool, page_stride, out, \
             num_threads);                                                                                   \
    }

#define MOTET_NORM(NAME, CENTRED, T)                                                                               \
    MOTET_CALL void NAME(const T* x, int64_t x_stride, const T* residual, const void* weight, int weight_is_float, \
                         T* total, T* normed, int64_t num_rows, int64_t width, float eps, int num_threads) {       \
        const auto with = [&](auto* weights) {                                                                     \
            add_norm<CENTRED>(x, x_stride, residual, weights, total, normed, num_rows, width, eps, num_threads);   \
        };                                                                                                         \
        weight_is_float ? with((const float*)weight) : with((const T*)weight);                                     \
    }

#define MOTET_KERNELS(NAME, T)                                                                                         \
    MOTET_CALL void paged_attention_##NAME(const void* q, void* out, const void* kv, const int64_t* query_starts,      \
                                           const int64_t* context_lens, const int32_t* pages,                          \
                                           const int64_t* page_starts, const int64_t* sizes, const float* sinks,       \
                                           float scale, float softcap, int num_threads) {                              \
        attention<T>(q, out, kv, query_starts, context_lens, pages, page_starts, sizes, sinks, scale, softcap,         \
                     num_threads);                                                                                     \
    }                                                                                                                  \
    MOTET_CALL void write_kv_##NAME(const T* q, const T* k, const T* v, const float* rotary, T* kv,                    \
                                    const int64_t* positions, const int64_t* row_pages, const int64_t* row_slots,      \
                                    T* q_out, const int64_t* sizes, int num_threads) {                                 \
        write_kv(q, k, v, rotary, kv, positions, row_pages, row_slots, q_out, sizes, num_threads);                     \
    }                                                                                                                  \
    MOTET_CALL int64_t linear_depth_##NAME() { return Outputs<T>::kDepth; }                                            \
    MOTET_CALL int64_t linear_panel_##NAME() { return panel_of<T>() * kLanes; }                                        \
    MOTET_CALL int64_t linear_is_best_##NAME() { return linear_is_best<T>(); }                                         \
    MOTET_CALL void linear_##NAME(const T* x, int64_t x_stride, int64_t num_rows, const T* weight, const T* bias,      \
                                  T* y, int64_t y_stride, int64_t num_in, int64_t num_out, int num_threads) {          \
        const int64_t rows[] = {0, num_rows};                                                                          \
        linear(x, x_stride, rows, 1, LinearCall<T>{nullptr, weight, bias, y, 0, y_stride, num_in, num_out}, 0,         \
               num_threads);                                                                                           \
    }                                                                                                                  \
    MOTET_CALL void linear_groups_##NAME(const T* x, int64_t x_stride, const int64_t* offsets, int64_t num_groups,     \
                                         const T* weight, int64_t weight_stride, const T* bias, T* y,                  \
                                         int64_t y_stride, int64_t num_in, int64_t num_out, int num_threads) {         \
        linear(x, x_stride, offsets, num_groups,                                                                       \
               LinearCall<T>{nullptr, weight, bias, y, 0, y_stride, num_in, num_out}, weight_stride, num_threads);     \
    }                                                                                                                  \
    MOTET_CALL void linear_to_floats_##NAME(const T* x, int64_t x_stride, int64_t num_rows, const T* weight, float* y, \
                                            int64_t num_in, int64_t num_out, int num_threads) {                        \
        const int64_t rows[] = {0, num_rows};                                                                          \
        linear(x, x_stride, rows, 1, LinearCall<T, float>{nullptr, weight, nullptr, y, 0, num_out, num_in, num_out},   \
               0, num_threads);                                                                                        \
    }                                                                                                                  \
    MOTET_RECURRENCE(gated_delta, DeltaLayer, NAME, T)                                                                 \
    MOTET_RECURRENCE(short_convolution, ShortConvolutionLayer, NAME, T)                                                \
    MOTET_RECURRENCE(mamba, MambaLayer, NAME, T)                                                                       \
    MOTET_CALL void linear_of_bytes_##NAME(const T* x, int64_t x_stride, int64_t num_rows, const uint8_t* weight,      \
                                           const float* scales, const T* bias, T* y, int64_t y_stride, int64_t num_in, \
                                           int64_t num_out, int num_threads) {                                         \
        linear_of_bytes(x, x_stride, num_rows, weight, scales, bias, y, y_stride, num_in, num_out, num_threads);       \
    }                                                                                                                  \
    MOTET_CALL int64_t linear_takes_float8_##NAME() { return takes_float8<T>(); }                                      \
    MOTET_CALL void linear_of_codes_##NAME(                                                                            \
        const T* x, int64_t x_stride, const int64_t* offsets, int64_t num_groups, const uint32_t* weight,              \
        const float* scales, const uint8_t* exponents, const int8_t* zeros, const float* table, const T* bias, T* y,   \
        int64_t y_stride, int64_t num_in, int64_t num_out, int64_t group_size, int num_threads) {                      \
        linear_of_codes(x, x_stride, RowGroups{offsets, num_groups},                                                   \
                        CodeCall<T, T>{nullptr, nullptr, weight, scales, exponents, zeros, table, bias, y, y_stride,   \
                                       num_in, num_out, group_size, 0, 0},                                             \
                        num_threads);                                                                                  \
    }                                                                                                                  \
    MOTET_CALL void run_step_##NAME(const void* operations, int64_t count, const void* call) {                         \
        run_step<T>((const StepOperation*)operations, count, *(const StepCall*)call);                                  \
    }                                                                                                                  \
    MOTET_CALL void lora_shrink_##NAME(const T* layer, int64_t page_stride, int64_t slab, const int64_t* pages,        \
                                       const void* parts, int64_t num_parts, const T* x, int64_t x_stride, T* shrunk,  \
                                       int num_threads) {                                                              \
        shrink(LoraPages<T>{layer, page_stride, slab, pages}, (const LoraPart*)parts, num_parts, x, x_stride, shrunk,  \
               num_threads);                                                                                           \
    }                                                                                                                  \
    MOTET_CALL void lora_expand_##NAME(const T* layer, int64_t page_stride, int64_t slab, const int64_t* pages,        \
                                       const void* parts, int64_t num_parts, const T* shrunk, int64_t shrunk_stride,   \
                                       T* y, int64_t y_stride, int num_threads) {                                      \
        expand(LoraPages<T>{layer, page_stride, slab, pages}, (const LoraPart*)parts, num_parts, shrunk,               \
               shrunk_stride, y, y_stride, num_threads);                                                               \
    }                                                                                                                  \
    MOTET_CALL void lora_add_##NAME(const T* layer, int64_t page_stride, int64_t slab, const int64_t* pages,           \
                                    const void* parts, int64_t num_parts, const T* x, int64_t x_stride, T* y,          \
                                    int64_t y_stride, int64_t length, int num_threads) {                               \
        add(LoraPages<T>{layer, page_stride, slab, pages}, (const LoraPart*)parts, num_parts, x, x_stride, y,          \
            y_stride, length, num_threads);                                                                            \
    }                                                                                                                  \
    MOTET_CALL void set_columns_##NAME(const T* layer, int64_t page_stride, int64_t slab, const int64_t* pages,        \
                                       const void* table, const T* x, int64_t x_stride, const int64_t* ids, float* y,  \
                                       int64_t y_stride, int num_threads) {                                            \
        set_columns(LoraPages<T>{layer, page_stride, slab, pages}, *(const LoraPart*)table, x, x_stride, ids, y,       \
                    y_stride, num_threads);                                                                            \
    }                                                                                                                  \
    MOTET_CALL void scale_outputs_##NAME(const T* layer, int64_t page_stride, int64_t slab, const int64_t* pages,      \
                                         const void* parts, int64_t num_parts, T* y, int64_t y_stride,                 \
                                         int num_threads) {                                                            \
        scale_outputs(LoraPages<T>{layer, page_stride, slab, pages}, (const LoraPart*)parts, num_parts, y, y_stride,   \
                      num_threads);                                                                                    \
    }                                                                                                                  \
    MOTET_ACTIVATIONS(MOTET_GATED, NAME, T)                                                                            \
    MOTET_CALL void clamped_swiglu_##NAME(const T* gate_up, int64_t stride, T* to, int64_t num_rows, int64_t width,    \
                                          float alpha, float limit, int num_threads) {                                 \
        clamped_swiglu(gate_up, stride, to, num_rows, width, alpha, limit, num_threads);                               \
    }                                                                                                                  \
    MOTET_NORM(add_rms_norm_##NAME, false, T)                                                                          \
    MOTET_NORM(add_layer_norm_##NAME, true, T)

MOTET_CALL void highest_tokens(const float* logits, int64_t stride, int64_t vocab, const void* masks, int64_t num_rows,
                               int64_t* tokens, int num_threads) {
    highest(logits, stride, vocab, (const Mask*)masks, num_rows, tokens, num_threads);
}

MOTET_CALL int num_narrow_outputs() { return int(kNarrowOutputs); }
MOTET_CALL int num_draw_numbers() { return sizeof(Draw) / sizeof(double); }
MOTET_CALL int num_penalty_numbers() { return sizeof(PenaltyFactors) / sizeof(double); }

MOTET_CALL void penalise_tokens(float* logits, int64_t stride, const void* rows, int64_t num_rows, const void* factors,
                                int num_threads) {
    penalise(logits, stride, (const PenalisedRow*)rows, num_rows, (const PenaltyFactors*)factors, num_threads);
}

MOTET_CALL void draw_tokens(const float* logits, int64_t stride, int64_t vocab, const void* masks, const int64_t* rows,
                            int64_t num_rows, const void* draws, int64_t* tokens, int num_threads) {
    draw(logits, stride, vocab, (const Mask*)masks, rows, num_rows, (const Draw*)draws, tokens, num_threads);
}

MOTET_KERNELS(float32, float)
MOTET_KERNELS(bfloat16, Bfloat16)
