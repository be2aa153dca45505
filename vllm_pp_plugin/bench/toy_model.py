"""A small Llama with seeded weights and a byte-level tokenizer, written like any Hugging Face checkpoint.

It is made of code, not downloaded: 5 M parameters, 19 MB in fp32. Its greedy tokens are stable and differ with
the seed. Tokens of random models repeat themselves and hide errors: compare logprobs too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["build"]

_MARK = "toy_model.json"
_SCALE = 0.08


def build(folder: Path, *, layers: int = 8, seed: int = 0, max_tokens: int = 4096) -> Path:
    """Write the model, unless ``folder`` holds this very model already.

    Args:
        folder: Where to write it.
        layers: Number of decoder layers.
        seed: Of the weights.
        max_tokens: Longest sequence.

    Returns:
        ``folder``.
    """
    recipe = {"layers": layers, "seed": seed, "max_tokens": max_tokens, "version": 1}
    mark = folder / _MARK
    if mark.exists() and json.loads(mark.read_text()) == recipe:
        return folder

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_tokens,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _SCALE)
    model.save_pretrained(folder, safe_serialization=True)
    _tokenizer().save_pretrained(folder)
    mark.write_text(json.dumps(recipe))
    return folder


def _tokenizer() -> Any:
    """Bytes are tokens 0 to 255; then <s> and </s>. No merges, so every text has one spelling."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
