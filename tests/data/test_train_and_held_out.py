"""Which text is trained on, which is held out, and that a part of it comes from everywhere."""

import json

import numpy as np
import pytest
import tokenizers

from jdllm.config import preset
from jdllm.data.train_and_held_out import evenly, spread, train_and_held_out

EOS, T = 256, 8


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte: the number of a document can be read off its tokens."""
    vocab = {char: i for i, char in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())} | {"<eos>": EOS}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def write(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def numbered(count):
    return [f"{number:04d} " * 20 for number in range(count)]


def config(data, **changes):
    return preset("smoke").replace(
        data=data,
        model__num_tokens=T,
        model__num_latents=T,
        **{"feed__max_tokens": None, "feed__valid_windows": 30} | changes,
    )


def numbers(windows, tokenizer):
    """The documents that windows were cut from."""
    text = " ".join(tokenizer.decode(row[:length].tolist()) for row, length in zip(windows.ids, windows.lengths))
    return {int(word) for word in text.split() if len(word) == 4 and word.isdecimal()}


def test_every_20th_document_is_held_out_and_never_trained_on(tmp_path, tokenizer):
    data = write(tmp_path / "many.jsonl", numbered(60))
    train, valid = train_and_held_out(config(data), tokenizer, EOS)
    assert numbers(valid, tokenizer) == {19, 39, 59}
    assert numbers(train, tokenizer) == set(range(60)) - {19, 39, 59}


@pytest.mark.parametrize("count", [1, 2, 7, 19])
def test_few_documents_still_leave_some_text_aside(tmp_path, tokenizer, count):
    data = write(
        tmp_path / "few.jsonl", ["".join(f"{i:04d} " for i in range(400)) if count == 1 else n for n in numbered(count)]
    )
    train, valid = train_and_held_out(config(data), tokenizer, EOS)
    assert len(valid) and not numbers(train, tokenizer) & numbers(valid, tokenizer)


def test_named_held_out_text_leaves_all_of_data_to_training(tmp_path, tokenizer):
    data, other = write(tmp_path / "a.jsonl", numbered(40)), write(tmp_path / "b.jsonl", ["9999 " * 50])
    train, valid = train_and_held_out(config(data, valid_data=other), tokenizer, EOS)
    assert numbers(train, tokenizer) == set(range(40)) and numbers(valid, tokenizer) == {9999}


def test_a_part_of_the_text_comes_from_all_over_it_within_the_limit(tmp_path, tokenizer):
    data = write(tmp_path / "many.jsonl", numbered(60))
    limit = 60 * 100 // 5
    train, valid = train_and_held_out(config(data, feed__max_tokens=limit, feed__valid_windows=9), tokenizer, EOS)
    assert 0.8 * limit <= train.num_tokens <= limit and len(valid) == 9
    seen = numbers(train, tokenizer)
    assert min(seen) < 6 and max(seen) > 53
    assert numbers(valid[:6], tokenizer) == {19, 39, 59}  # the first few stand for all


def test_choosing_is_the_same_every_time_and_takes_no_window_twice(tokenizer):
    documents = ["".join(f"{i:04d} " for i in range(500))]
    first, again = (spread(documents, tokenizer, T, EOS, 400) for _ in range(2))
    assert first.hash == again.hash
    assert len({row.tobytes() for row in first.ids}) == len(first)


@pytest.mark.parametrize(("length", "count"), [(10, 3), (3, 10), (1, 1), (1000, 999)])
def test_even_choice(length, count):
    rows = evenly(length, count)
    assert len(set(rows.tolist())) == min(length, count) and rows[0] == 0 and (np.diff(rows) > 0).all()
