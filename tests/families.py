"""The fields of tiny models, by the family's model_type: those that make its traits matter."""

from __future__ import annotations

from typing import Any

from tiny_tokenizer import VOCAB_SIZE

# What every family gets unless a test overrides it: GQA, two layers, a head_dim that is no power
# of two.
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_LAYER_NORM: dict[str, Any] = {"layer_norm_eps": 1e-4}
# Latent attention, whose inner norms have an epsilon of their own.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-2,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
# With temperatures of positions, as Llama 4 has them.
_MISTRAL_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LATENT_EXPERTS: dict[str, Any] = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
FAMILY: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {**_LAYER_NORM, "logit_scale": 0.3},
    "cohere2": {
        **_LAYER_NORM,
        "logit_scale": 0.3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        **_LATENT_EXPERTS,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_LATENT_EXPERTS,
        "num_nextn_predict_layers": 0,
        "rope_parameters": _YARN,
    },
    "dots1": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "sliding_window": None,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {
        "moe_intermediate_size": 32,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "use_bias": False,
        "moe_norm_min": 0.9,
    },
    "exaone4": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "exaone_moe": {
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-4,
    },
    "falcon": {"bias": True},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 3, "rms_norm_eps": 1e-4},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {"head_dim": 16, "hidden_size": 64},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **_LATENT_EXPERTS,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 6},
    "gpt_neo": {
        "layer_norm_epsilon": 1e-4,
        "window_size": 20,
        "attention_layers": ["global", "local"],
    },
    "gpt_neox": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "granitemoeshared": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
    },
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "moe_topk": 3,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "hy_v3": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.7,
        "attention_bias": True,
        "rms_norm_eps": 1e-4,
    },
    "llama": {},
    "minicpm3": {**_LATENT, "scale_emb": 3.0, "scale_depth": 0.8, "dim_model_base": 32},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "ministral": {
        "head_dim": 12,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": dict(_MISTRAL_YARN),
    },
    "mistral": {"sliding_window": None},
    "mistral4": {
        **_LATENT_EXPERTS,
        "first_k_dense_replace": 0,
        "rope_parameters": dict(_MISTRAL_YARN),
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "nemotron": {
        "norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "opt": {},
    "persimmon": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi": {
        **_LAYER_NORM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "phi3": {},
    "phimoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.02,
        "rms_norm_eps": 1e-4,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "qwen2": {},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "rms_norm_eps": 1e-4,
    },
    "stablelm": {
        **_LAYER_NORM,
        "use_qkv_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "starcoder2": {"norm_epsilon": 1e-4},
    "youtu": {
        **_LATENT,
        "rope_parameters": _YARN,
    },
}
# Text models that are only found within others: the first by head_dim 12, of 6 frequencies.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT_FAMILY: dict[str, dict[str, Any]] = {
    "glm4v_text": {
        "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
    },
    "qwen2_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2]}},
    "qwen2_5_vl_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 2, 3]}},
    "qwen3_vl_text": {
        "head_dim": 16,
        "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "qwen3_vl_moe_text": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
