"""The keys of config.json that a family reads: their types, and what they mean where they are absent.

Every other key that some decoder of transformers computes with is refused unless its value changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .family import ROPE_KEYS, Family

# The keys of config.json with which some decoder of transformers computes.

# The fields of the config classes of all models in MODEL_FOR_CAUSAL_LM_MAPPING of transformers 5.24.0, those of
# their text models included, without what a forward pass of a trained model does not depend on: dropout, initial
# values, losses, tokens' ids, caches, lengths, classifiers, and sizes that tensors must fit. Beside them keys that are
# read without being fields, by transformers and, `llama_4_scaling`, by vLLM.
_NAMES: Final = """
    H_cycles L_bp_cycles L_cycles _remove_final_layer_norm activation activation_function
    activation_sparsity_pattern adapter_layer_norm adapter_rank adapter_reduction_factor
    adapter_reuse_layer_norm add_bias_linear add_cross_attention add_out_norm afn alibi altup_active_idx
    altup_coef_clip altup_correct_scale altup_num_inputs apply_residual_connection_post_layernorm
    apply_spec_augment asm attention_bias attention_chunk_size attention_head_dim attention_head_size
    attention_heads attention_hidden_size attention_in_multiplier attention_k_eq_v attention_multiplier
    attention_out_bias attention_out_multiplier attention_softmax_in_fp32 attention_type attention_types
    attention_value_scale attention_window_size attn_config attn_layer_indices attn_layer_offset
    attn_layer_period attn_layers attn_logit_softcapping attn_scale attn_temperature_tuning attn_type
    audio_chunk_size audio_config audio_encoder audio_encoder_config audio_merge_size audio_vocab_size
    autocast_kernel_dtype axial_norm_std axial_pos_embds axial_pos_embds_dim axial_pos_shape
    backbone_hidden_size bi_data bias block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of
    block_size block_types causal cca_time0 cca_time1 centroid_intermediate_top_k chain_hidden_post_norm
    chroma_length chunk_size chunk_size_feed_forward chunk_size_lm_head clamp_len clip_qkv compress_rates
    compress_rope_theta concat_input conv1d_width conv_L_cache conv_bias conv_kernel_size
    cross_attention_hidden_size cross_attention_layers cross_attn_k d_head d_inner d_rel decoder
    decoder_attention_heads decoder_bias decoder_config decoder_layers decoder_sparse_step decoder_vocab_size
    default_language depth_decoder_config dff dim_ff dim_head dim_model_base do_layer_norm_before emb_dim
    embedding_dim embedding_fraction embedding_multiplier embedding_scale embedding_size enable_bias
    enable_moe_block enable_moe_fp32_combine enable_pronunciation enable_shape encoder_attention_heads
    encoder_config encoder_hash_byte_group_nb_functions encoder_hash_byte_group_size
    encoder_hash_byte_group_vocab encoder_layers encoder_no_repeat_ngram_size end_n_top eps expand
    expansion_ratio expert_ffn_hidden_size expert_layer_offset expert_layer_period expert_selection_fn
    feed_forward_size ff_activation final_logit_softcapping first_k_dense_replace floor_scale
    full_attn_alpha_factor full_attn_beta_factor full_attn_idxs gate_soft_cap gated_norm_rank gating
    gelu_activation global_attn_every_n_layers global_config hash_seed hc_count hc_eps hc_lowrank hc_magnitude
    hc_mult hc_sinkhorn_iters head_dim heads_per_ngram hidden_act hidden_activation hidden_mamba_act hidden_size
    hidden_size_per_layer_input image_size index_block_size index_head_dim index_local_blocks index_n_heads
    index_topk index_topk_blocks indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads
    indexer_n_heads indexer_types inference_state_dtype input_embedding_size interleave_moe_layer_step
    intermediate_multiple_size intermediate_size_mlp is_causal is_encoder is_encoder_decoder is_moe
    kda_lower_bound kda_safe_gate keep_window_size key_multiplier kv_channels kv_lora_rank lambda_std_dev
    lang_id languages laurel_rank layer_group_size layer_norm_elementwise_affine layer_norm_eps
    layer_norm_epsilon layer_rope_theta layer_types layernorm_embedding layers_block_type learned_pos_emb
    linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_attn_alpha_factor linear_attn_beta_factor
    linear_conv_kernel_dim linear_dt_max linear_dt_min linear_head_dim linear_key_head_dim linear_num_heads
    linear_num_key_heads linear_num_value_heads linear_value_head_dim llama_4_scaling lm_head_bias
    lm_head_multiplier ln_before_adapter local_attention local_attention_window_len local_attn_chunk_length
    local_layer_ids local_num_chunks_after local_num_chunks_before log_scaling_alpha log_scaling_n_floor
    logit_scale logits_mup_width_multiplier logits_scaling logits_soft_cap loop_gate_rank loop_layer_index_end
    loop_layer_index_start loop_num_passes lru_width lsh_attn_chunk_length lsh_num_chunks_after
    lsh_num_chunks_before make_ngram_vocab_size_divisible_by mamba_conv_bias mamba_d_conv
    mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim mamba_hidden_act
    mamba_n_groups mamba_n_heads mamba_ngroups mamba_norm_before_gate mamba_num_heads mamba_proj_bias
    mamba_rms_norm mamba_ssm_cache_dtype mask_index max_inference_chunksize max_patch_length
    max_position_embeddings max_window_layers median_filter_width mem_len mixer_rms_eps mlp_alpha_factor
    mlp_beta_factor mlp_bias mlp_gate_softcap mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers
    mlp_up_softcap mode moe_apply_router_weight_on_input moe_k moe_latent_size moe_layer_end_index
    moe_layer_interval moe_layer_start_index moe_layers moe_norm_min moe_num_experts moe_num_shared_experts
    moe_routed_scaling_factor moe_router_logit_softcapping moe_shared_expert_overlap moe_topk multi_query
    mup_enabled n_group n_groups n_inner n_input_layers n_langs n_layers_per_attn_res_block n_mamba_heads
    n_output_layers n_recurrent_layers n_recurrent_loops n_routed_experts n_shared_experts
    new_decoder_architecture ngram ngram_size ngram_vocab_size_base no_bias no_rope_layer_interval
    no_rope_layers norm_bias norm_eps norm_epsilon norm_reduction_force_float32 norm_topk_prob norm_type
    num_attention_heads num_attention_heads_per_layer num_blocks num_buckets num_centroids num_channels
    num_chroma num_codebooks num_decoder_attention_heads num_decoder_layers num_dense_layers
    num_encoder_attention_heads num_encoder_layers num_experts num_experts_per_tok num_hashes num_hidden_layers
    num_image_with_embedding num_key_value_heads num_kv_shared_layers num_layers_per_stack
    num_ln_in_parallel_attn num_local_experts num_mel_bins num_mem_blocks num_nextn_predict_layers
    num_random_blocks num_shared_experts o_groups o_lora_rank original_max_position_embeddings parallel_attn
    partial_rotary_factor patch_in_forward patch_size patcher_config patching_batch_size patching_mode
    patching_threshold per_layer_config ple_conv_kernel_size ple_embed_dim ple_layer_ids pooling
    position_bias_max_distance position_bias_num_buckets position_embedding_type pre_norm
    prefix_dense_sliding_window_pattern prefix_lm projector_bias projector_hidden_act projectors_bias
    prompt_length prompt_mid_dim prompt_types pronunciation_embed_dim pronunciation_vocab_size q_lora_rank
    qk_dim_factor qk_head_dim qk_l2_clip_threshold qk_layernorm qk_nope_head_dim qk_rope_head_dim qkv_bias
    query_pre_attn_scalar recurrent_kv_cache_mode rel_extent rel_l2_clip_threshold relative_max_distance
    reorder_and_upcast_attn rescale_embeddings rescale_every rescale_prenorm_residual residual_in_fp32
    residual_multiplier reuse_len rms_norm_eps rms_norm_eps_moe_gate rope_interleave rope_local_base_freq
    rope_parameters rope_scaling rope_theta rotary_dim rotary_value route_scale routed_scaling_factor
    router_hidden_size router_scaling_factor same_length scale_attention_softmax_in_fp32
    scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb scale_embedding scoring_func
    segment_types shape_embed_dim shape_vocab_size share_encoder_decoder_embeddings
    shared_expert_combination_strategy shared_expert_sink short_conv_kernel_size sinusoidal_embeddings
    sliding_window sliding_window_pattern sliding_window_size slow_but_exact split_ngram_parts ssm_in_multiplier
    ssm_multipliers ssm_out_multiplier ssm_state_size start_n_top state_size swa_head_dim
    swa_num_attention_heads swa_num_key_value_heads swiglu_alpha swiglu_limit task_type_vocab_size text_config
    text_encoder tie_word_embeddings time_step_floor time_step_limit time_step_max time_step_min time_step_rank
    time_step_scale top_k_experts topk_group topk_method type_vocab_size unk_index unpadded_vocab_size
    use_attention_gate use_bias use_bidirectional_attention use_conv_bias use_double_wide_mlp use_expert_bias
    use_lang_emb use_learned_position_embeddings use_long_context use_mem_rope use_mems_eval use_mems_train
    use_ordered_embeddings use_parallel_residual use_post_norm use_prompt use_qk_norm use_qkv_bias
    use_sandwich_norm use_shared_attention_adapter use_sliding_window use_task_id use_weighted_layer_sum
    v_dim_factor v_head_dim vision_config vocab_size vocab_size_per_layer_input vocabulary_map vq_config
    weight_mode window_size word_embed_proj_dim zero_expert_num
"""
DECODER_KEYS: Final = frozenset(_NAMES.split())


_MAX_SIZE: Final = 1 << 31
_MAX_LAYERS: Final = 10_000

# Null means something of its own: no window, no cap, and lists that follow from other keys. Elsewhere null is accepted
# where it is the family's default.
_NULLABLE: Final = frozenset(
    {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "mlp_only_layers"}
    | {"no_rope_layers", "full_attn_idxs", "position_embedding_type"}
)
_WINDOW_KEYS: Final = frozenset({"sliding_window", "max_window_layers"})  # with `use_sliding_window` alone
_OLD_NAMES: Final = {
    "num_experts": "num_local_experts",
    "layers_block_type": "layer_types",
    "mamba_dt_min": "time_step_min",
}
_PATTERN: Final = "hybrid_override_pattern"
_LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_FACTORS: Final = re.compile(r"(multiplier|scale|scaling|factor)$")  # 1 changes nothing


def read_keys(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The values of all keys that the family reads, defaults filled in; those of the rotary embedding as they stand.

    Raises ValueError for a value of another type, KeyError for a key that is needed and absent.
    """
    raw = _renamed(raw if not family.has_halves else _with_layer_types(raw), family)
    _refuse_unread(raw, family)
    values: dict[str, Any] = {key: _checked(key, raw[key]) for key in _NEEDED if key not in family.defaults}
    for key, default in family.defaults.items():
        value = raw.get(key, default)
        is_null = value is None and (default is None or key in _NULLABLE or key in family.nullable)
        values[key] = None if is_null else _checked(key, value, default)
        if key in family.computes and values[key] != family.computes[key]:
            raise ValueError(
                f"{key} = {value!r} is not supported for {family.name}: set it to {family.computes[key]!r}"
            )
    return values | {key: raw[key] for key in ROPE_KEYS if key in raw}


def _renamed(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """What transformers 5 writes by another name than it had before, and reads by both.

    A pattern of layers that slide does not count beside `layer_types`: that of EXAONE 4 may be a text then, or null.
    """
    pattern = "sliding_window_pattern"
    if pattern in family.defaults and raw.get("layer_types") and isinstance(raw.get(pattern), str | None):
        raw = {key: value for key, value in raw.items() if key != pattern}
    numbers = raw.get("moe_topk") if "moe_topk" in family.defaults else None
    if isinstance(numbers, list) and numbers and numbers == numbers[:1] * raw["num_hidden_layers"]:
        raw = {**raw, "moe_topk": numbers[0]}  # of each layer; those that differ are refused
    for old, new in {**_OLD_NAMES, **family.old_names}.items():
        if old not in raw or new not in family.defaults:
            continue
        if new in raw and raw[old] != raw[new]:
            raise ValueError(f"{old} = {raw[old]!r} contradicts {new} = {raw[new]!r}: keep one")
        raw = {key: value for key, value in raw.items() if key != old} | {new: raw[old]}
    return raw


def _with_layer_types(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nemotron-H: with the kinds of all layers, which older files give as letters, and with their number."""
    kinds = raw.get("layers_block_type") or raw.get("layer_types")
    if kinds is None:
        pattern = raw.get(_PATTERN)
        if not isinstance(pattern, str) or not pattern or not {*pattern} <= _LETTERS.keys():
            raise ValueError(
                f"{_PATTERN} = {pattern!r}, without layers_block_type: a text of {', '.join(_LETTERS)} is needed"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
        raw = {key: value for key, value in raw.items() if key != "layers_block_type"} | {"layer_types": kinds}
    return {**raw, "num_hidden_layers": len(kinds)} if isinstance(kinds, list) else raw


def _refuse_unread(raw: Mapping[str, Any], family: Family) -> None:
    """A key that this family does not read would change the answers of another, so somebody expects it to."""
    read = _NEEDED.keys() | family.defaults.keys() | ROPE_KEYS
    for key in () if family.rotates else ("rope_scaling", "rope_parameters"):
        if raw.get(key):
            raise ValueError(
                f"{key} = {raw[key]!r} is not supported for {family.name}, which rotates nothing: leave it out"
            )
    for key in sorted((raw.keys() & DECODER_KEYS) - read):
        value, accepted = raw[key], "leave it out or set it to null"
        if not value or (value == 1 and (value is not True) and _FACTORS.search(key)):
            continue
        if key in family.computes:
            if value == family.computes[key] and isinstance(value, bool) == isinstance(family.computes[key], bool):
                continue
            accepted = f"leave it out or set it to {family.computes[key]!r}"
        if key in _WINDOW_KEYS and not raw.get("use_sliding_window", family.defaults.get("use_sliding_window", True)):
            continue
        if key in ("hidden_act", "hidden_activation") and value == raw.get(family.activation_key, value):
            continue  # old files say it by both names
        if value == raw.get({"norm_eps": family.norm_eps_key, "attention_head_dim": "head_dim"}.get(key, "")):
            continue  # likewise those of Nemotron-H and Hunyuan
        if key == "layer_types" and {*value} == {"full_attention"} and raw.get("sliding_window") is None:
            continue
        raise ValueError(
            f"{key} = {value!r} is not supported for {family.name}: other decoders compute with it and this family "
            f"does not, so {accepted}"
        )


def _checked(key: str, value: Any, default: Any = None) -> Any:
    needed, is_fine = _TYPES[key]
    if not is_fine(value):
        otherwise = "" if default is None else f", or no such key, which means {default!r}"
        raise ValueError(f"{key} = {value!r}: {needed} is needed{otherwise}")
    return value


def is_whole(value: Any, minimum: int = 1, maximum: int = _MAX_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def limits(value: Any) -> tuple[float, float] | None:
    """The numbers of a list of two, the least first; None: it is no such list. transformers writes inf as a text."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = (math.inf if each in ({"__float__": "Infinity"}, "Infinity") else each for each in value)
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (low, high))
    return (float(low), float(high)) if are_numbers and low <= high else None


_Type = tuple[str, Callable[[Any], bool]]
_SIZE: Final[_Type] = (f"a whole number from 1 to {_MAX_SIZE}", is_whole)
_COUNT: Final[_Type] = (f"a whole number from 0 to {_MAX_SIZE}", lambda value: is_whole(value, 0))
_FLAG: Final[_Type] = ("true or false", lambda value: isinstance(value, bool))
_NUMBER: Final[_Type] = ("a number above 0", is_positive)
_TEXT: Final[_Type] = ("a text", lambda value: isinstance(value, str))
_AUTO: Final[_Type] = ("a whole number from 1 or 'auto'", lambda value: value == "auto" or is_whole(value))
_TEXTS: Final[_Type] = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(element, str) for element in value),
)
_NUMBERS: Final[_Type] = (
    "a list of numbers above 0",
    lambda value: isinstance(value, list) and all(is_positive(element) for element in value),
)
_LAYERS: Final[_Type] = (
    "a list of layers' numbers",
    lambda value: isinstance(value, list) and all(is_whole(element, 0) for element in value),
)

_NEEDED: Final[Mapping[str, _Type]] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": (
        f"a whole number from 1 to {_MAX_LAYERS}",
        lambda value: is_whole(value, maximum=_MAX_LAYERS),
    ),
    "num_attention_heads": _SIZE,
    "max_position_embeddings": _SIZE,
}
_TYPES: Final[Mapping[str, _Type]] = {
    **_NEEDED,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "sliding_window": ("a whole number from 1 or null", is_whole),
    "rms_norm_eps": _NUMBER,
    "layer_norm_eps": _NUMBER,
    "norm_epsilon": _NUMBER,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "qkv_bias": _FLAG,
    "attention_out_bias": _FLAG,
    "original_max_position_embeddings": _SIZE,
    "use_bias": _FLAG,
    "attention_multiplier": _NUMBER,
    "embedding_multiplier": _NUMBER,
    "residual_multiplier": _NUMBER,
    "logits_scaling": _NUMBER,
    "logit_scale": _NUMBER,
    "no_rope_layers": (
        "a list of 0 and 1",
        lambda value: isinstance(value, list) and all(is_whole(element, 0, 1) for element in value),
    ),
    "no_rope_layer_interval": _SIZE,
    "query_pre_attn_scalar": _SIZE,
    "attn_logit_softcapping": _NUMBER,
    "final_logit_softcapping": _NUMBER,
    "layer_types": _TEXTS,
    "mlp_layer_types": _TEXTS,
    "sliding_window_pattern": _SIZE,
    "use_sliding_window": _FLAG,
    "max_window_layers": _COUNT,
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "num_experts_per_tok": _COUNT,  # 0 without experts, as in the dense ones of Granite 4
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
    "swiglu_alpha": _NUMBER,
    "swiglu_limit": _NUMBER,
    "norm_topk_prob": _FLAG,
    "n_routed_experts": _COUNT,
    "n_shared_experts": _SIZE,
    "n_group": _SIZE,
    "topk_group": _SIZE,
    "topk_method": _TEXT,
    "first_k_dense_replace": _COUNT,
    "routed_scaling_factor": _NUMBER,
    "use_qk_norm": _FLAG,
    "intermediate_size_mlp": _SIZE,
    "moe_layers": _LAYERS,
    "interleave_moe_layer_step": _SIZE,
    "moe_num_experts": _COUNT,
    "moe_k": _SIZE,
    "moe_topk": _SIZE,
    "moe_num_shared_experts": _COUNT,
    "moe_layer_start_index": _COUNT,
    "moe_layer_end_index": (
        "a whole number from 0, or -1: the last layer",
        lambda value: value == -1 or is_whole(value, 0),
    ),
    "moe_layer_interval": _SIZE,
    "moe_norm_min": (  # that no sum of likelihoods comes near
        "a number from 0 to 1e-9",
        lambda value: value == 0 or (is_positive(value) and value <= 1e-9),
    ),
    "attention_chunk_size": _SIZE,
    "attn_temperature_tuning": _FLAG,
    "floor_scale": _SIZE,
    "attn_scale": _NUMBER,
    "rotary_dim": _SIZE,
    "num_nextn_predict_layers": _COUNT,
    "decoder_sparse_step": _SIZE,
    "full_attention_interval": _SIZE,
    "linear_conv_kernel_dim": ("a whole number from 2", lambda value: is_whole(value, 2)),
    "linear_key_head_dim": _SIZE,
    "linear_value_head_dim": _SIZE,
    "linear_num_key_heads": _SIZE,
    "linear_num_value_heads": _SIZE,
    "shared_intermediate_size": _SIZE,
    "position_embedding_type": _TEXT,
    "mamba_n_heads": _SIZE,
    "mamba_n_groups": _SIZE,
    "mamba_d_state": _SIZE,
    "mamba_d_head": _AUTO,
    "mamba_d_conv": ("a whole number from 2", lambda value: is_whole(value, 2)),
    "mamba_expand": _SIZE,
    "mamba_conv_bias": _FLAG,
    "mamba_d_ssm": _SIZE,
    "mamba_norm_before_gate": _FLAG,
    "mamba_rms_norm": _FLAG,
    "projectors_bias": _FLAG,
    "lm_head_multiplier": _NUMBER,
    "mlp_multipliers": _NUMBERS,
    "key_multiplier": _NUMBER,
    "attention_out_multiplier": _NUMBER,
    "attention_in_multiplier": _NUMBER,
    "ssm_multipliers": _NUMBERS,
    "ssm_in_multiplier": _NUMBER,
    "ssm_out_multiplier": _NUMBER,
    "mamba_proj_bias": _FLAG,
    "time_step_limit": ("a list of two numbers, the least first", lambda value: limits(value) is not None),
    "time_step_min": _NUMBER,
    "time_step_max": _NUMBER,
    "time_step_floor": _NUMBER,
    "time_step_rank": _AUTO,
    "norm_eps": _NUMBER,
    "conv_bias": _FLAG,
    "conv_L_cache": ("a whole number from 2", lambda value: is_whole(value, 2)),
    "full_attn_idxs": _LAYERS,
    "block_auto_adjust_ff_dim": _FLAG,
    "block_ffn_dim_multiplier": _NUMBER,
    "block_multiple_of": _SIZE,
    "block_ff_dim": _SIZE,
    "tie_embedding": _FLAG,
    "layer_norm_epsilon": _NUMBER,
    "mlp_hidden_act": _TEXT,
    "residual_in_fp32": _FLAG,
    "ssm_state_size": _SIZE,
    "mamba_num_heads": _SIZE,
    "mamba_head_dim": _SIZE,
    "mamba_hidden_act": _TEXT,
    "n_groups": _SIZE,
    "conv_kernel": ("a whole number from 2", lambda value: is_whole(value, 2)),
    "use_conv_bias": _FLAG,
    "expand": _SIZE,
    "chunk_size": _SIZE,
    "mamba_ssm_cache_dtype": _TEXT,
    "rescale_prenorm_residual": _FLAG,
    "moe_latent_size": _SIZE,
    "moe_shared_expert_intermediate_size": _SIZE,
    "moe_shared_expert_overlap": _FLAG,
    "q_lora_rank": _SIZE,
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "qk_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "rope_interleave": _FLAG,
    "rope_local_base_freq": _NUMBER,
    "mlp_only_layers": _LAYERS,
    "attention_k_eq_v": _FLAG,
    "enable_moe_block": _FLAG,
    "use_double_wide_mlp": _FLAG,
    "num_kv_shared_layers": _COUNT,
    "hidden_size_per_layer_input": _COUNT,
    "vocab_size_per_layer_input": _SIZE,
    "global_head_dim": _SIZE,
    "num_global_key_value_heads": _SIZE,
    "top_k_experts": _SIZE,
    "per_layer_config": (
        "an object of objects of whole numbers from 1, by layer's number",
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(sizes, dict) and all(map(is_whole, sizes.values())) for sizes in value.values())
        ),
    ),
}
