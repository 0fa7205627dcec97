"""Small random models that any server loads: the same bytes on every machine, made in a second without torch.

5.5 million parameters in float32, a tokenizer of one token a byte. Its KV cache is 16,384 bytes a token (8 layers, 4
heads of 64, keys and values), so that a context of some thousand tokens weighs as much on flash as a real model's short
one, while two cores still compute it. Weights are wide enough (standard deviation 0.08) that greedy output depends on
the whole context: wrong KV shows up as other tokens.

That is ``full``, a Llama. The same weights also make models that attend to the last 512 tokens only, in all layers
(``sliding``, a Mistral) or in three of four (``interleaved``). ``latent`` is a DeepSeek V2 with MLA, whose heads share
576 values a token and layer; 4.3 million parameters.

``python -m rewarm.testing.tiny_model DIR [KIND]`` makes one.
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM, VOCABULARY = 256, 512, 8, 4, 64, 512
WINDOW_TOKENS = 512
"""Of the layers that slide."""
LATENT_LAYERS, LATENT_RANK, ROPE_DIM = 4, 512, 64
"""Of ``latent``: vLLM's kernel for MLA on CPU is made for this rank and rotary size only."""
_LLAMA_SHA256 = "1db61e288bce7fda41c84e31397da9a965603e19aead05375c44110b77b9cc2b"
SHA256 = {
    "full": _LLAMA_SHA256,
    "sliding": _LLAMA_SHA256,
    "interleaved": _LLAMA_SHA256,
    "latent": "a9bd9e007be5e51618d6f9f9a2f0ec04049f33914edd38804033d29a338d6978",
}
"""Kind -> of model.safetensors; checked whenever the model is asked for."""

_DEVIATION = 0.08
_SEED = b"rewarm tiny model 1"

_COMMON = {
    "attention_bias": False,
    "bos_token_id": 256,
    "dtype": "float32",
    "eos_token_id": 257,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 32768,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}
_LLAMA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "head_dim": HEAD_DIM,
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
}
_SLIDING = {
    **_LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": WINDOW_TOKENS,
}
_CONFIGS: dict[str, dict[str, object]] = {
    "full": _LLAMA,
    "sliding": _SLIDING,
    "interleaved": {
        **_SLIDING,
        "layer_types": [f"{'full' if layer % 4 == 3 else 'sliding'}_attention" for layer in range(LAYERS)],
    },
    "latent": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": LATENT_LAYERS,
        "kv_lora_rank": LATENT_RANK,
        "model_type": "deepseek_v2",
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "num_hidden_layers": LATENT_LAYERS,
        "q_lora_rank": None,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": HEAD_DIM,
    },
}


def ensure_tiny_model(folder: str | os.PathLike[str], kind: str = "full") -> Path:
    """The folder with a model of ``kind`` in it: made when it is not there, or not whole.

    Raises:
        ValueError: There is no such kind.
        RuntimeError: This machine makes other bytes than every other one.
    """
    if kind not in SHA256:
        raise ValueError(f"no tiny model is called {kind!r}; there are {', '.join(SHA256)}")
    target = Path(folder)
    weights = target / "model.safetensors"
    if weights.exists() and _sha256(weights) == SHA256[kind] and (target / "tokenizer.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tiny-model-") as scratch:
        _write(Path(scratch), kind)
        found = _sha256(Path(scratch) / "model.safetensors")
        if found != SHA256[kind]:
            raise RuntimeError(f"the tiny model has sha256 {found} here, expected {SHA256[kind]}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(scratch, target)
    return target


def _write(folder: Path, kind: str) -> None:
    _write_json(folder / "config.json", _CONFIGS[kind])
    _write_json(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 257})
    _write_json(folder / "tokenizer.json", _tokenizer())
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(folder / "tokenizer_config.json", {**tokenizer_config, "model_max_length": 32768})
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    tensors = list(_latent_tensors() if kind == "latent" else _llama_tensors())
    for name, shape in tensors:
        begin, end = end, end + 4 * _count(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            file.write(_values(name, _count(shape)))


def _llama_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, in file order."""
    attention = {f"{name}_proj": (HEADS * HEAD_DIM, HIDDEN) for name in "koqv"}
    return _tensors(LAYERS, attention)


def _latent_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same for ``latent``."""
    attention = {
        "kv_a_layernorm": (LATENT_RANK,),
        "kv_a_proj_with_mqa": (LATENT_RANK + ROPE_DIM, HIDDEN),
        "kv_b_proj": (HEADS * 2 * HEAD_DIM, LATENT_RANK),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "q_proj": (HEADS * (HEAD_DIM + ROPE_DIM), HIDDEN),
    }
    return _tensors(LATENT_LAYERS, attention)


def _tensors(num_layers: int, attention: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield prefix + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        for name, shape in attention.items():
            yield f"{prefix}self_attn.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)


def _values(name: str, count: int) -> bytes:
    """``count`` float32, little-endian: ones for a norm, else evenly spread with the deviation above.

    Each value is exact in float32 (a hash byte pair, centred, times a power-of-two fraction), so no machine's rounding
    can change it.
    """
    if name.endswith("norm.weight"):
        values = array.array("f", [1.0]) * count
    else:
        words = array.array("H", hashlib.shake_256(_SEED + name.encode()).digest(2 * count))
        if sys.byteorder == "big":
            words.byteswap()
        values = array.array("f", map(_levels().__getitem__, words))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@functools.cache
def _levels() -> array.array[float]:
    """65,536 levels, evenly spread around 0: 12 ** 0.5 deviations wide, the width rounded to 9 bits."""
    width = round(_DEVIATION * 12**0.5 * 512) / 512
    return array.array("f", [(word - 32767.5) / 65536 * width for word in range(1 << 16)])


def _tokenizer() -> dict[str, object]:
    """A byte-level BPE without merges: every byte is one token, then the two special ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = sorted([chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))])
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": "<s>", **special}, {"id": 257, "content": "</s>", **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**{symbol: index for index, symbol in enumerate(symbols)}, "<s>": 256, "</s>": 257},
            "merges": [],
        },
    }


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_tiny_model(*sys.argv[1:3])}\n")
