// A step as one program: a list of operations over registers, each carried out by the kernel that is also called alone.
// The contract is ../step.py.
//
// A register is `[rows of the step, its width]`, contiguous. The caller passes operations and a step's arguments as
// tables of int64, in the order of the fields here; a float is the bits of a double.
#pragma once

#include "attention.h"
#include "experts.h"
#include "four_bits.h"
#include "gated_delta.h"
#include "linear.h"
#include "lora.h"
#include "mamba.h"
#include "rows.h"
#include "short_convolution.h"

namespace motet {

enum class StepKind : int64_t {
    kEmbed,
    kAddNorm,
    kNorm,
    kLinear,
    kLora,
    kWriteKV,
    kAttend,
    kGated,
    kChooseExperts,
    kTakePairs,
    kExpertLinear,
    kExpertLora,
    kCombinePairs,
    kAddGated,
    kMultiplyGate,
    kGatedDelta,
    kShortConvolution,
    kMamba,
    kAdd,
    kJoinEmbedding,
    kNarrowLora,
    kByteLinear,
    kCodeLinear,
    kCodeExperts,
    kActivate,
    kAffine
};

struct StepOperation {
    StepKind kind;
    int64_t x, to;  // registers
    union {
        struct {
            const void* table;
            int64_t width;
            double scale;
        } embed;
        struct {  // the sum of `x` and the residual is written to the residual; a residual below 0: none
            int64_t residual, width;
            const void* weight;
            int64_t weight_is_float;
            double eps;
            int64_t is_centred;
        } add_norm;
        struct {  // in place, of `count` neighbours of `dim` columns each, from `column` on
            int64_t width, column, count, dim;
            const void* weight;
            int64_t weight_is_float;
            double eps;
            int64_t is_centred;
        } norm;
        struct {
            const void *weight, *bias;
            int64_t num_in, num_out;
        } linear;
        struct {
            int64_t layer, group, num_in, num_out;
        } lora;
        struct {  // `num_out`: of the adapters, in the register `padded`; `width`: of their columns that are added
            int64_t layer, group, num_in, num_out, padded, width;
        } narrow_lora;
        struct {
            void* kv;
            const float* rotary;
            int64_t num_heads, num_kv_heads, dim, page_stride, v_offset, slot_stride, rotary_sides, column;
        } write_kv;
        struct {
            const void* kv;
            int64_t num_heads, num_kv_heads, dim, page_stride, v_offset, slot_stride, block_size, window;
            double scale, softcap;
            const float* sinks;
        } attend;
        struct {  // `kernel`: a `GatedKernel`; null: `clamped_swiglu`. `per_row`: rows of x for each row of the step
            int64_t width;
            const void* kernel;
            int64_t per_row;
            double alpha, limit;
        } gated;
        struct {
            int64_t num_experts, top_k, is_normalized, is_sigmoid, num_groups, top_groups, group_best;
            double scale, eps;
            const float *bias, *factors;  // null: none
        } choose_experts;
        struct {
            int64_t width, is_scaled;
        } pairs;  // taken or combined
        struct {
            int64_t width;
            double scale;
        } add;
        struct {
            int64_t beside;
            const void* table;
            int64_t stride, width;
            double scale;
        } join_embedding;
        struct {
            const void* weight;
            int64_t weight_stride, num_in, num_out;
            const void* bias;  // null: none
        } expert_linear;
        struct {  // `num_out`: of each of the modules
            int64_t layer, all_modules, first_module, num_modules, num_in, num_out;
        } expert_lora;
        struct {
            int64_t gates, width;
        } add_gated;
        struct {
            int64_t gates, width, gate_stride, column;
        } multiply_gate;
        struct {  // `count` columns from `column` on; null: none
            int64_t width, column, count;
            const float *weight, *bias;
        } affine;
        struct {  // `kind`: an `Ungated`
            int64_t width, kind;
            double parameters[4];
        } activate;
        struct {
            const void* layer;
            int64_t width;  // of x
        } recurrence;
        struct {  // of eight bits, or of four, which have zero points or null, scales or exponents, a table, and groups
            const void *weight, *scales, *bias;
            int64_t num_in, num_out;
            const void *exponents, *zeros, *table;
            int64_t group_size;
        } narrow_linear;
    };
};
static_assert(sizeof(StepOperation) == 15 * 8, "as many numbers as ../native/step.py writes");

// The parts of some modules that share an input, in a step's adapters.
struct LoraGroup {
    const LoraPart* parts;
    int64_t num_parts, length;  // `length`: elements of the shrunk vectors
    const LoraPart* outputs;    // whose adapters scale and shift outputs
    int64_t num_outputs;
};

struct StepCall {
    void** registers;
    int64_t num_rows;
    const int64_t *token_ids, *positions, *row_pages, *row_slots;
    int64_t num_sequences;
    const int64_t *query_starts, *context_lens;
    const int32_t* pages;
    const int64_t* page_starts;
    void* pool;
    int64_t pool_page_stride, pool_layer_stride, slab;
    const int64_t* lora_pages;
    const LoraGroup* lora_groups;  // null: no row has an adapter
    const int64_t* output_pages;   // of adapters that scale and shift outputs
    int64_t num_expert_segments;
    const ExpertSegment* expert_segments;
    const int64_t* expert_pages;
    int64_t num_threads;
    const StateBatch* states;  // null: no layer has any
    const void* embedded;      // the tokens' rows in place of the tables'; null: those
};

template <class T>
class Step {
  public:
    explicit Step(const StepCall& call) : call(call), num_threads(int(call.num_threads)) {}

    void run(const StepOperation& op) const {
        switch (op.kind) {
            case StepKind::kEmbed:
                return embed(op);
            case StepKind::kAddNorm:
                return add_norm(op);
            case StepKind::kAdd:
                return motet::add_rows(of(op.x), of(op.to), call.num_rows, op.add.width, float(op.add.scale),
                                       num_threads);
            case StepKind::kJoinEmbedding:
                return join(op);
            case StepKind::kNorm:
                return norm(op);
            case StepKind::kLinear:
                return multiply(op);
            case StepKind::kByteLinear:
                return multiply_bytes(op);
            case StepKind::kCodeLinear: {
                const int64_t rows[] = {0, call.num_rows};
                return multiply_codes(op, {rows, 1});
            }
            case StepKind::kCodeExperts:
                return multiply_codes(op, {pairs.offsets.data(), int64_t(pairs.offsets.size()) - 1});
            case StepKind::kLora:
                return add_adapters(op.lora.layer, op.lora.group, of(op.x), op.lora.num_in, of(op.to), op.lora.num_out);
            case StepKind::kNarrowLora:
                return add_narrow_adapters(op);
            case StepKind::kWriteKV:
                return write(op);
            case StepKind::kAttend:
                return attend_pages(op);
            case StepKind::kGated:
                return gate(op);
            case StepKind::kChooseExperts:
                return choose(op);
            case StepKind::kTakePairs:
                if (op.pairs.is_scaled) return take_scaled(pairs, of(op.x), op.pairs.width, of(op.to), num_threads);
                return take_pairs(pairs, of(op.x), op.pairs.width, of(op.to), num_threads);
            case StepKind::kExpertLinear:
                return multiply_pairs(op);
            case StepKind::kExpertLora:
                return add_expert_adapters(op);
            case StepKind::kCombinePairs:
                return combine_pairs(pairs, of(op.x), op.pairs.width, of(op.to), num_threads);
            case StepKind::kAddGated:
                return motet::add_gated(of(op.x), of(op.add_gated.gates), of(op.to), call.num_rows, op.add_gated.width,
                                        num_threads);
            case StepKind::kMultiplyGate:
                return multiply_gates(op);
            case StepKind::kActivate:
                return motet::activate(Ungated(op.activate.kind), op.activate.parameters, of(op.x), of(op.to),
                                       call.num_rows, op.activate.width, num_threads);
            case StepKind::kAffine:
                return motet::affine(of(op.x) + op.affine.column, op.affine.width, op.affine.weight, op.affine.bias,
                                     call.num_rows, op.affine.count, num_threads);
            case StepKind::kGatedDelta:
                return recur(op, motet::gated_delta<T>);
            case StepKind::kShortConvolution:
                return recur(op, motet::short_convolution<T>);
            case StepKind::kMamba:
                return recur(op, motet::mamba<T>);
        }
    }

  private:
    const StepCall& call;
    const int num_threads;
    static inline thread_local ExpertPairs pairs;  // of the layer that is computed

    T* of(int64_t place) const { return (T*)call.registers[place]; }

    void embed(const StepOperation& op) const {
        const auto& [table, width, scale] = op.embed;
        T* to = of(op.to);
        for (int64_t row = 0; row < call.num_rows; row++) {
            const T* from =
                call.embedded ? (const T*)call.embedded + row * width : (const T*)table + call.token_ids[row] * width;
            if (scale == 1.0) {
                std::memcpy(to + row * width, from, size_t(width) * sizeof(T));
                continue;
            }
            for (int64_t i = 0; i < width; i += kLanes)
                store(to + row * width + i, load(from + i, width - i) * float(scale), width - i);
        }
    }

    void join(const StepOperation& op) const {
        const auto& own = op.join_embedding;
        for (int64_t row = 0; row < call.num_rows; row++) {
            const T* table = (const T*)own.table + call.token_ids[row] * own.stride;
            const T* beside = of(own.beside) + row * own.width;
            T* to = of(op.to) + 2 * row * own.width;
            std::memcpy(to, of(op.x) + row * own.width, size_t(own.width) * sizeof(T));
            for (int64_t i = 0; i < own.width; i += kLanes) {
                const int64_t count = own.width - i;
                const Floats token = rounded<T>(load(table + i, count) * float(own.scale));
                store(to + own.width + i, load(beside + i, count) + token, count);
            }
        }
    }

    void add_norm(const StepOperation& op) const {
        const auto& own = op.add_norm;
        T* residual = own.residual < 0 ? nullptr : of(own.residual);
        const auto with = [&](auto is_centred, auto* weight) {
            motet::add_norm<is_centred.value>(of(op.x), own.width, (const T*)residual, weight, residual, of(op.to),
                                              call.num_rows, own.width, float(own.eps), num_threads);
        };
        const auto of_kind = [&](auto* weight) {
            own.is_centred ? with(std::true_type{}, weight) : with(std::false_type{}, weight);
        };
        own.weight_is_float ? of_kind((const float*)own.weight) : of_kind((const T*)own.weight);
    }

    void norm(const StepOperation& op) const {
        const auto& own = op.norm;
        share_rows(call.num_rows, own.count * own.dim, num_threads, [&](int64_t start, int64_t end) {
            for (int64_t row = start; row < end; row++) {
                T* x = of(op.x) + row * own.width + own.column;
                const auto with = [&](auto is_centred, auto* weight) {
                    motet::add_norm<is_centred.value>((const T*)x, own.dim, (const T*)nullptr, weight, (T*)nullptr, x,
                                                      own.count, own.dim, float(own.eps), 1);
                };
                const auto of_kind = [&](auto* weight) {
                    own.is_centred ? with(std::true_type{}, weight) : with(std::false_type{}, weight);
                };
                own.weight_is_float ? of_kind((const float*)own.weight) : of_kind((const T*)own.weight);
            }
        });
    }

    void multiply(const StepOperation& op) const {
        const auto& own = op.linear;
        const int64_t rows[] = {0, call.num_rows};
        const LinearCall<T> product{nullptr, (const T*)own.weight, (const T*)own.bias, of(op.to),
                                    0,       own.num_out,          own.num_in,         own.num_out};
        linear(of(op.x), own.num_in, rows, 1, product, 0, num_threads);
    }

    void multiply_bytes(const StepOperation& op) const {
        const auto& own = op.narrow_linear;
        linear_of_bytes(of(op.x), own.num_in, call.num_rows, (const uint8_t*)own.weight, (const float*)own.scales,
                        (const T*)own.bias, of(op.to), own.num_out, own.num_in, own.num_out, num_threads);
    }

    void multiply_codes(const StepOperation& op, const RowGroups& groups) const {
        const auto& own = op.narrow_linear;
        const CodeCall<T, T> product{nullptr,
                                     nullptr,
                                     (const uint32_t*)own.weight,
                                     (const float*)own.scales,
                                     (const uint8_t*)own.exponents,
                                     (const int8_t*)own.zeros,
                                     (const float*)own.table,
                                     (const T*)own.bias,
                                     of(op.to),
                                     own.num_out,
                                     own.num_in,
                                     own.num_out,
                                     own.group_size,
                                     0,
                                     0};
        linear_of_codes(of(op.x), own.num_in, groups, product, num_threads);
    }

    void add_adapters(int64_t layer, int64_t place, const T* x, int64_t num_in, T* to, int64_t num_out) const {
        if (!call.lora_groups) return;
        const LoraGroup& group = call.lora_groups[place];
        const LoraPages<T> pages{(const T*)call.pool + layer * call.pool_layer_stride, call.pool_page_stride, call.slab,
                                 call.lora_pages};
        add(pages, group.parts, group.num_parts, x, num_in, to, num_out, group.length, num_threads);
        if (group.num_outputs)
            scale_outputs(LoraPages<T>{pages.layer, pages.page_stride, pages.slab, call.output_pages}, group.outputs,
                          group.num_outputs, to, num_out, num_threads);
    }

    void add_narrow_adapters(const StepOperation& op) const {
        const auto& own = op.narrow_lora;
        if (!call.lora_groups || call.lora_groups[own.group].num_parts == 0) return;
        T *padded = of(own.padded), *to = of(op.to);
        std::memset(padded, 0, size_t(call.num_rows * own.num_out) * sizeof(T));
        add_adapters(own.layer, own.group, of(op.x), own.num_in, padded, own.num_out);
        for (int64_t row = 0; row < call.num_rows; row++)
            motet::add_rows(padded + row * own.num_out, to + row * own.width, 1, own.width, 1.0f, 1);
    }

    void write(const StepOperation& op) const {
        const auto& own = op.write_kv;
        const int64_t row = own.column + (own.num_heads + 2 * own.num_kv_heads) * own.dim;
        const T *q = of(op.x) + own.column, *k = q + own.num_heads * own.dim, *v = k + own.num_kv_heads * own.dim;
        const int64_t sizes[] = {call.num_rows,
                                 own.num_heads,
                                 own.num_kv_heads,
                                 own.dim,
                                 row,
                                 own.dim,
                                 row,
                                 own.dim,
                                 row,
                                 own.dim,
                                 own.page_stride,
                                 own.v_offset,
                                 own.slot_stride,
                                 own.rotary_sides,
                                 own.num_kv_heads};
        motet::write_kv(q, k, v, own.rotary, (T*)own.kv, call.positions, call.row_pages, call.row_slots, of(op.to),
                        sizes, num_threads);
    }

    void attend_pages(const StepOperation& op) const {
        const auto& own = op.attend;
        const AttentionCall<T> attention{
            of(op.x),     of(op.to),        (const T*)own.kv,        call.query_starts, call.context_lens,
            call.pages,   call.page_starts, call.num_sequences,      own.num_heads,     own.num_kv_heads,
            own.dim,      own.block_size,   own.num_heads * own.dim, own.dim,           own.page_stride,
            own.v_offset, own.slot_stride,  float(own.scale),        own.window,        float(own.softcap),
            own.sinks};
        attend_all(attention, num_threads);
    }

    void gate(const StepOperation& op) const {
        const auto& own = op.gated;
        const int64_t num_rows = call.num_rows * own.per_row;
        const auto kernel = (GatedKernel<T>*)own.kernel;
        if (kernel) return kernel(of(op.x), 2 * own.width, of(op.to), num_rows, own.width, num_threads);
        clamped_swiglu(of(op.x), 2 * own.width, of(op.to), num_rows, own.width, float(own.alpha), float(own.limit),
                       num_threads);
    }

    void multiply_gates(const StepOperation& op) const {
        const auto& own = op.multiply_gate;
        multiply_gate((const T*)of(op.x), (const T*)of(own.gates) + own.column, own.gate_stride, of(op.to),
                      call.num_rows, own.width, num_threads);
    }

    template <class Layer>
    void recur(const StepOperation& op, void (*compute)(const Layer&, const StateBatch&, const T*, int64_t, int64_t, T*,
                                                        int64_t, T*, int)) const {
        const auto& own = op.recurrence;
        compute(*(const Layer*)own.layer, *call.states, of(op.x), own.width, call.num_rows, (T*)call.pool,
                call.pool_page_stride, of(op.to), num_threads);
    }

    void choose(const StepOperation& op) const {
        const auto& own = op.choose_experts;
        const Routing routing{
            own.top_k,      own.is_normalized != 0, own.is_sigmoid != 0, own.num_groups, own.top_groups,
            own.group_best, float(own.scale),       float(own.eps),      own.bias,       own.factors};
        choose_experts(of(op.x), call.num_rows, own.num_experts, routing, pairs, num_threads);
    }

    void multiply_pairs(const StepOperation& op) const {
        const auto& own = op.expert_linear;
        const LinearCall<T> product{nullptr, (const T*)own.weight, (const T*)own.bias, of(op.to),
                                    0,       own.num_out,          own.num_in,         own.num_out};
        linear(of(op.x), own.num_in, pairs.offsets.data(), int64_t(pairs.offsets.size()) - 1, product,
               own.weight_stride, num_threads);
    }

    void add_expert_adapters(const StepOperation& op) const {
        if (call.num_expert_segments == 0) return;
        const auto& own = op.expert_lora;
        static thread_local std::vector<LoraPart> parts;
        int64_t length;
        find_expert_parts(pairs, call.expert_segments, call.num_expert_segments, own.all_modules, own.first_module,
                          own.num_modules, own.num_in, own.num_out, parts, length);
        const LoraPages<T> pages{(const T*)call.pool + own.layer * call.pool_layer_stride, call.pool_page_stride,
                                 call.slab, call.expert_pages};
        add(pages, parts.data(), int64_t(parts.size()), of(op.x), own.num_in, of(op.to), own.num_modules * own.num_out,
            length, num_threads);
    }
};

template <class T>
void run_step(const StepOperation* operations, int64_t count, const StepCall& call) {
    const Step<T> step(call);
    for (int64_t i = 0; i < count; i++) step.run(operations[i]);
}

}  // namespace motet
