"""Windows hold every token of the text once, in order, and know where it ends."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jdllm.data import windows as module
from jdllm.data.text import DataError
from jdllm.data.windows import Windows, check_vocabulary, decode, pack, split, tokenizer_hash

EOS = 256
PROSE = 'It was late. "Who is there?" he said;\nnobody - not even 12 men, nor O\'Neil - answered.\n\n  The end (of it): soon. '


@pytest.fixture
def tokenizer():
    """Bytes as tokens 0-255, and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 15, 16, 17])
def test_a_document_ends_in_eos_and_padding(tokenizer, length):
    text = "abcdefghijklmnopqrst"[:length]
    windows = pack([text], tokenizer, 8, EOS)
    assert windows.ids.dtype == windows.lengths.dtype == np.int32
    flat = np.concatenate([row[:valid] for row, valid in zip(windows.ids, windows.lengths)])
    assert decode(tokenizer, flat, EOS) == text
    assert list(flat[:length]) == tokenizer.encode(text).ids
    alone = length % 8 == 0  # its EOS would stand in a window by itself, which is dropped
    assert windows.num_tokens == len(flat) == length + (not alone)
    for row, valid in zip(windows.ids, windows.lengths):
        assert valid >= 2 and (row[valid:] == EOS).all() and (row[: valid - 1] != EOS).all()
    assert (windows.lengths[:-1] == 8).all()


def test_no_window_holds_two_documents(tokenizer):
    windows = pack(["aaaaa", "bbb", "", "c" * 12], tokenizer, 8, EOS)
    assert [decode(tokenizer, row, EOS) for row in windows.ids] == ["aaaaa", "bbb", "cccccccc", "cccc"]


def test_an_eos_inside_the_text_ends_a_document(tokenizer):
    windows = pack(["<eos>abc<eos><eos>defg<eos>"], tokenizer, 8, EOS)
    assert [decode(tokenizer, row, EOS) for row in windows.ids] == ["abc", "defg"]
    assert list(windows.lengths) == [4, 5]


@pytest.mark.parametrize("t", [8, 50])
def test_pieces_and_chunks_do_not_change_tokens(tokenizer, monkeypatch, t):
    documents = [PROSE * 40, "short", "x" * 3000, PROSE[::-1] * 30]
    whole = pack(documents, tokenizer, t, EOS)
    monkeypatch.setattr(module, "_PIECE_CHARS", 100)
    monkeypatch.setattr(module, "_CHUNK_CHARS", 350)
    assert pack(documents, tokenizer, t, EOS).hash == whole.hash


def test_a_tokenizer_that_marks_the_beginning_gets_whole_documents(monkeypatch):
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(["▁", "a", "b", "</s>", "▁a"])}, [("▁", "a")])
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    whole = pack(["a b " * 100], tokenizer, 8, 3)
    monkeypatch.setattr(module, "_PIECE_CHARS", 10)
    assert pack(["a b " * 100], tokenizer, 8, 3).hash == whole.hash


def test_max_tokens_bounds_tokens_and_reading(tokenizer):
    read = []

    def documents():
        for i in range(10**6):
            read.append(i)
            yield "abcdefghij" * 10

    windows = pack(documents(), tokenizer, 16, EOS, max_tokens=1000)
    assert 1000 - 16 < windows.num_tokens <= 1000
    assert len(read) < 1000
    full = pack(["abcdefghij" * 10] * 20, tokenizer, 16, EOS)
    assert windows.hash == full[: len(windows)].hash


def test_truncation_and_padding_of_the_tokenizer_are_ignored(tokenizer):
    plain = pack([PROSE], tokenizer, 16, EOS)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    assert pack([PROSE], tokenizer, 16, EOS).hash == plain.hash
    assert tokenizer.truncation and tokenizer.padding


@pytest.mark.parametrize("documents, options", [([], {}), (["", ""], {}), (["abcdefgh"], {"max_tokens": 3})])
def test_no_window_at_all(tokenizer, documents, options):
    with pytest.raises(DataError, match="no window"):
        pack(documents, tokenizer, 8, EOS, **options)


def test_tokenizer_of_another_model(tokenizer):
    with pytest.raises(DataError, match="no token 5000"):
        pack(["abc"], tokenizer, 8, 5000)
    check_vocabulary(tokenizer, 257)
    with pytest.raises(DataError, match="256"):
        check_vocabulary(tokenizer, 256)


def test_decoding_stops_at_the_first_eos(tokenizer):
    a, b = tokenizer.encode("ab").ids
    assert decode(tokenizer, np.array([a, b, EOS, a, EOS], np.int32), EOS) == "ab"
    assert decode(tokenizer, [EOS, a], EOS) == "" and decode(tokenizer, [a, a], EOS) == "aa"


def test_split_holds_out_every_twentieth_document():
    documents = [f"document {i}" for i in range(45)]
    train, held_out = split(documents)
    assert held_out == ["document 19", "document 39"] and sorted(train + held_out) == sorted(documents)
    assert split(["a", "b", "c"]) == (["a", "b"], ["c"])


def test_split_of_one_document_cuts_off_its_end():
    text = "some words " * 200
    (train,), (held_out,) = split([text])
    assert train + " " + held_out == text and 0.03 < len(held_out) / len(text) <= 0.05
    for too_little in ([], ["word"], ["x" * 1000]):
        with pytest.raises(DataError, match="too little"):
            split(too_little)


def test_hashes_notice_every_change(tokenizer):
    windows = pack([PROSE], tokenizer, 16, EOS)
    ids, lengths = windows.ids.copy(), windows.lengths.copy()
    ids[-1, 0] += 1
    lengths[-1] -= 1
    variants = [dataclasses.replace(windows, ids=ids), dataclasses.replace(windows, lengths=lengths), windows[:-1]]
    variants.append(Windows(windows.ids.reshape(len(windows) * 2, 8), windows.lengths))
    assert len({windows.hash, *(variant.hash for variant in variants)}) == 5
    assert windows.hash == Windows(windows.ids.copy(), windows.lengths.astype(np.int64)).hash
    before = tokenizer_hash(tokenizer)
    assert before == tokenizer_hash(tokenizer.to_str()) and len(before) == 64
    tokenizer.add_tokens(["new"])
    assert tokenizer_hash(tokenizer) != before
