"""A small random Llama that any server loads: the same bytes on every machine, made in a second without torch.

5.5 million parameters in float32, a tokenizer of one token a byte. Its KV cache is 16,384 bytes a token (8 layers, 4
heads of 64, keys and values), so that a context of some thousand tokens weighs as much on flash as a real model's short
one, while two cores still compute it. Weights are wide enough (standard deviation 0.08) that greedy output depends on
the whole context: wrong KV shows up as other tokens.

``python -m rewarm.testing.tiny_model DIR`` makes one.
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
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM, VOCABULARY = 256, 512, 8, 4, 64, 512
SHA256 = "1db61e288bce7fda41c84e31397da9a965603e19aead05375c44110b77b9cc2b"
"""Of model.safetensors; checked whenever the model is asked for."""

_DEVIATION = 0.08
_SEED = b"rewarm tiny model 1"

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 256,
    "dtype": "float32",
    "eos_token_id": 257,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}


def ensure_tiny_model(folder: str | os.PathLike[str]) -> Path:
    """The folder with the model in it: made when it is not there, or not whole.

    Raises:
        RuntimeError: This machine makes other bytes than every other one.
    """
    target = Path(folder)
    weights = target / "model.safetensors"
    if weights.exists() and _sha256(weights) == SHA256 and (target / "tokenizer.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tiny-model-") as scratch:
        _write(Path(scratch))
        found = _sha256(Path(scratch) / "model.safetensors")
        if found != SHA256:
            raise RuntimeError(f"the tiny model has sha256 {found} here, expected {SHA256}")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(scratch, target)
    return target


def _write(folder: Path) -> None:
    _write_json(folder / "config.json", _CONFIG)
    _write_json(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 257})
    _write_json(folder / "tokenizer.json", _tokenizer())
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(folder / "tokenizer_config.json", {**tokenizer_config, "model_max_length": 32768})
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _tensors():
        begin, end = end, end + 4 * _count(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in _tensors():
            file.write(_values(name, _count(shape)))


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, in file order."""
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield prefix + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        for projection in ("k_proj", "o_proj", "q_proj", "v_proj"):
            yield f"{prefix}self_attn.{projection}.weight", (HEADS * HEAD_DIM, HIDDEN)
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
    sys.stdout.write(f"{ensure_tiny_model(sys.argv[1])}\n")
