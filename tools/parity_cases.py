"""Tiny random folders of every family, as transformers writes them and as it has written them before."""
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCABULARY = 101
BATCH, LENGTH = 2, 33


def llama(kind=LlamaConfig, **changed):
    """Llama or, with another class of config, a relative of it."""
    fields = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=8,
                  num_key_value_heads=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False)
    return kind(**(fields | changed))


def gpt2(**changed):
    fields = dict(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=3, n_head=4)
    return GPT2Config(**(fields | changed))


LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=48)
CONFIGS = {
    "llama_mha_free_head": llama(),
    "llama_gqa_tied": llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama_mqa": llama(num_key_value_heads=1),
    "llama_biases": llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama_head_24": llama(hidden_size=72, num_attention_heads=3, num_key_value_heads=3),
    "llama_head_80_gqa": llama(hidden_size=320, num_attention_heads=4, num_key_value_heads=2),
    "llama_head_dim_not_of_width": llama(num_attention_heads=4, num_key_value_heads=2, head_dim=24),
    "llama_theta_and_eps": llama(rope_parameters=dict(rope_type="default", rope_theta=500000.0), rms_norm_eps=1e-3),
    "llama_rope_llama3": llama(rope_parameters=LLAMA3, num_key_value_heads=2),
    "llama_rope_llama3_wide_heads": llama(rope_parameters=LLAMA3, hidden_size=128, num_attention_heads=2, num_key_value_heads=1),
    "llama_padding": llama(pad_token_id=0, tie_word_embeddings=True),
    "llama_padding_from_the_end": llama(pad_token_id=-1),
    "llama_rope_linear": llama(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama_config_of_transformers_4": llama(rope_parameters=LLAMA3),
    "llama_gelu_in_shards": llama(hidden_act="gelu"),
    "llama_bf16_file": llama(num_key_value_heads=4, dtype="bfloat16"),
    "gpt2_tied": gpt2(),
    "gpt2_free_head": gpt2(tie_word_embeddings=False),
    "gpt2_head_24_eps": gpt2(n_embd=72, n_head=3, layer_norm_epsilon=1e-3),
    "gpt2_inner_and_logit_factors": gpt2(n_inner=100, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
    "gpt2_gelu_one_head": gpt2(activation_function="gelu", n_head=1),
    "gpt2_file_of_2019": gpt2(),
    "qwen2_free_head": llama(Qwen2Config),
    "qwen2_gqa_tied": llama(Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_theta_and_eps": llama(Qwen2Config, rope_parameters=dict(rope_type="default", rope_theta=1e6), rms_norm_eps=1e-3),
    "qwen2_window_from_layer_1": llama(Qwen2Config, use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3),
    "qwen2_layer_types_gqa": llama(Qwen2Config, use_sliding_window=True, sliding_window=5, num_key_value_heads=4,
                                   layer_types=["sliding_attention", "full_attention"]),
    "qwen2_window_not_in_use": llama(Qwen2Config, sliding_window=9, max_window_layers=0),
    "qwen2_config_of_transformers_4": llama(Qwen2Config, num_key_value_heads=4),
    "qwen2_bf16_file": llama(Qwen2Config, num_key_value_heads=4, dtype="bfloat16"),
    "qwen3_head_16": llama(Qwen3Config, head_dim=16),
    "qwen3_default_head_gqa_tied": llama(Qwen3Config, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3_biases_eps": llama(Qwen3Config, head_dim=8, attention_bias=True, rms_norm_eps=1e-3),
    "qwen3_window_in_shards": llama(Qwen3Config, head_dim=8, num_key_value_heads=4, use_sliding_window=True, sliding_window=7,
                                    max_window_layers=0),
    "qwen3_config_of_transformers_4": llama(Qwen3Config, head_dim=24, num_key_value_heads=2),
    "mistral_gqa": llama(MistralConfig, num_key_value_heads=2, sliding_window=None),
    "mistral_window": llama(MistralConfig, sliding_window=8),
    "mistral_window_gqa_tied": llama(MistralConfig, num_key_value_heads=2, sliding_window=1, tie_word_embeddings=True),
    "mistral_window_of_the_length": llama(MistralConfig, sliding_window=33),
    "mistral_head_dim_theta": llama(MistralConfig, head_dim=24, num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
                                    rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "mistral_config_of_transformers_4": llama(MistralConfig, num_key_value_heads=4, sliding_window=32),
}


def randomise(model: torch.nn.Module) -> None:
    """Far from the initial values, where attention is nearly uniform and a wrong mask or rotation hardly shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.normal_(0 if name.endswith("bias") else 1, 0.2)


def spell_as_transformers_4(config: pathlib.Path) -> None:
    fields = json.loads(config.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope
    fields["torch_dtype"] = fields.pop("dtype")
    config.write_text(json.dumps(fields))


def spell_as_of_2019(weights: pathlib.Path, positions: int) -> None:
    """No prefix, the causal mask among the weights, a head beside the embedding that it is tied to."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(weights).items()}
    for layer in sorted({name.split(".")[1] for name in tensors if name.startswith("h.")}):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, positions, positions).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, weights, {"format": "pt"})


def make_case(name: str, folder: pathlib.Path) -> None:
    """folder/hf and folder/ids.safetensors"""
    config = CONFIGS[name]
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(list(CONFIGS).index(name))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    randomise(model)
    if "bf16_file" in name:
        model = model.to(torch.bfloat16)
    model.generation_config.pad_token_id = None  # transformers 5 saves no negative one there
    model.save_pretrained(folder / "hf", max_shard_size="60KB" if "shards" in name else "5GB")
    if "transformers_4" in name:
        spell_as_transformers_4(folder / "hf/config.json")
    if "2019" in name:
        spell_as_of_2019(folder / "hf/model.safetensors", config.n_positions)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    save_file({"ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}, folder / "ids.safetensors")
