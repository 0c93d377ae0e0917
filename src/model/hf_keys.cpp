#include "hf_keys.h"

#include <array>

namespace spipe::model {
namespace {

constexpr std::array kRefused = {
    RefusedKey{"quantization_config", "", "quantized weights"},
    RefusedKey{"num_experts", "0", "mixture of experts"},
    RefusedKey{"num_local_experts", "0", "mixture of experts"},
    RefusedKey{"n_routed_experts", "0", "mixture of experts"},
    RefusedKey{"num_experts_per_tok", "0", "mixture of experts"},
    RefusedKey{"moe_intermediate_size", "", "mixture of experts"},
    RefusedKey{"kv_lora_rank", "", "latent attention"},
    RefusedKey{"q_lora_rank", "", "latent attention"},
    RefusedKey{"attention_multiplier", "", "a scale of the attention scores other than 1/sqrt(head size)"},
    RefusedKey{"query_pre_attn_scalar", "", "a scale of the attention scores other than 1/sqrt(head size)"},
    RefusedKey{"residual_multiplier", "1", "scaled residual branches"},
    RefusedKey{"embedding_multiplier", "1", "scaled embeddings"},
    RefusedKey{"scale_emb", "1", "scaled embeddings"},
    RefusedKey{"scale_embedding", "false", "scaled embeddings"},
    RefusedKey{"scale_depth", "1", "scaled residual branches"},
    RefusedKey{"logits_scaling", "1", "scaled logits"},
    RefusedKey{"logit_scale", "1", "scaled logits"},
    RefusedKey{"attn_logit_softcapping", "", "soft-capped attention scores"},
    RefusedKey{"final_logit_softcapping", "", "soft-capped logits"},
    RefusedKey{"logit_softcap", "", "soft-capped logits"},
    RefusedKey{"parallel_attn", "false", "attention and MLP side by side"},
    RefusedKey{"use_parallel_residual", "false", "attention and MLP side by side"},
    RefusedKey{"parallel_residual", "false", "attention and MLP side by side"},
    RefusedKey{"partial_rotary_factor", "1", "rotary positions on a part of the head"},
    RefusedKey{"rotary_pct", "1", "rotary positions on a part of the head"},
    RefusedKey{"rope_interleave", "false", "interleaved rotary pairs"},
    RefusedKey{"rope_interleaved", "false", "interleaved rotary pairs"},
    RefusedKey{"use_mrope", "false", "multimodal rotary positions"},
    RefusedKey{"no_rope_layers", "", "layers without rotary positions"},
    RefusedKey{"no_rope_layer_interval", "", "layers without rotary positions"},
    RefusedKey{"attention_chunk_size", "", "chunked attention"},
    RefusedKey{"alibi", "false", "ALiBi positions"},
    RefusedKey{"use_alibi", "false", "ALiBi positions"},
    RefusedKey{"scale_attn_weights", "true", "attention scores without their scale"},
    RefusedKey{"scale_attn_by_inverse_layer_idx", "false", "attention scores scaled by the layer's number"},
    RefusedKey{"add_cross_attention", "false", "cross-attention"},
    RefusedKey{"is_encoder_decoder", "false", "an encoder"},
    RefusedKey{"do_layer_norm_before", "true", "norms after the residual sum (OPT 350M)"},
    RefusedKey{"_remove_final_layer_norm", "false", "a model without final norm"},
    RefusedKey{"layer_norm_elementwise_affine", "true", "norms without weights"},
    RefusedKey{"clip_qkv", "", "clipped q, k and v"},
    RefusedKey{"use_qk_norm", "false", "normed q and k (only qwen3 has them)"},
    RefusedKey{"qk_layernorm", "false", "normed q and k (only qwen3 has them)"},
    RefusedKey{"pruned_heads", "{}", "pruned heads"},
    RefusedKey{"adapters", "", "adapters"},
    RefusedKey{"vision_config", "", "a vision tower"},
    RefusedKey{"audio_config", "", "an audio tower"},
};

constexpr auto kCarried =
    std::to_array<std::string_view>({"attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout",
                                     "activation_dropout", "layerdrop",  // kDropoutKeys
                                     "bos_token_id", "eos_token_id", "pad_token_id"});
constexpr std::size_t kDropoutKeys = 7;

constexpr auto kIgnored = std::to_array<std::string_view>({"architectures",
                                                           "model_type",
                                                           "_name_or_path",
                                                           "name_or_path",
                                                           "transformers_version",
                                                           "torch_dtype",
                                                           "dtype",
                                                           "use_cache",
                                                           "pretraining_tp",
                                                           "auto_map",
                                                           "_attn_implementation",
                                                           "attn_implementation",
                                                           "_attn_implementation_autoset",
                                                           "gradient_checkpointing",
                                                           "output_attentions",
                                                           "output_hidden_states",
                                                           "output_past",
                                                           "return_dict",
                                                           "torchscript",
                                                           "use_bfloat16",
                                                           "is_decoder",
                                                           "id2label",
                                                           "label2id",
                                                           "problem_type",
                                                           "finetuning_task",
                                                           "tokenizer_class",
                                                           "prefix",
                                                           "sep_token_id",
                                                           "decoder_start_token_id",
                                                           "forced_bos_token_id",
                                                           "forced_eos_token_id",
                                                           "reorder_and_upcast_attn",
                                                           "n_ctx",
                                                           "summary_type",
                                                           "summary_activation",
                                                           "summary_first_dropout",
                                                           "summary_proj_to_labels",
                                                           "summary_use_proj",
                                                           "task_specific_params",
                                                           "unsloth_version",
                                                           "unsloth_fixed"});

}  // namespace

std::span<const RefusedKey> refused_keys() { return kRefused; }
std::span<const std::string_view> carried_keys() { return kCarried; }
std::span<const std::string_view> dropout_keys() { return std::span(kCarried).first(kDropoutKeys); }
std::span<const std::string_view> ignored_keys() { return kIgnored; }

}  // namespace spipe::model
