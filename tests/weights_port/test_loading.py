"""What is read of a checkpoint in many files, what that costs in memory, and what is said of a damaged one."""

import json
import threading

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from weights_port import checkpoints, loading
from weights_port.checkpoints import EncoderError, open_checkpoint
from weights_port.encoder import load_encoder
from weights_port.head import folded_head
from weights_port.tiny import byte_tokenizer_json, save_tiny_multimodal, text_config

IDS = np.random.default_rng(0).integers(0, 256, (3, 19)).astype(np.int32)
LENGTHS = np.array([19, 7, 1])
FILE = "model-{:05d}-of-00005.safetensors".format


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny_multimodal(request.param, folder)


@pytest.fixture
def reads(monkeypatch):
    """(file, tensor) of everything that is read, and the files that are opened."""
    seen = {"tensors": [], "files": []}
    real = checkpoints._open_safetensors

    class Recording:
        def __init__(self, path):
            seen["files"].append(path.name)
            self._file, self._name = real(path), path.name

        def keys(self):
            return self._file.keys()

        def get_tensor(self, key):
            seen["tensors"].append((self._name, key))
            return self._file.get_tensor(key)

    monkeypatch.setattr(checkpoints, "_open_safetensors", Recording)
    return seen


def test_states_equal_those_of_the_full_multimodal_model(whole):
    folder, model = whole
    mask = torch.arange(19)[None] < torch.from_numpy(LENGTHS)[:, None]
    with torch.no_grad():
        output = model(
            input_ids=torch.from_numpy(IDS).long(),
            attention_mask=mask.long(),
            output_hidden_states=True,
            use_cache=False,
        )
    for layer in (0, 1, -3, -1):
        states = load_encoder(str(folder), layer=layer, device="cpu").states(IDS, LENGTHS)
        torch.testing.assert_close(states[mask], output.hidden_states[layer][mask], atol=1e-6, rtol=1e-5)
    head = load_file(folder / FILE(5))["lm_head.weight"]
    logits = output.hidden_states[-1] @ head.T
    torch.testing.assert_close(logits[mask], output.logits[mask], atol=1e-5, rtol=1e-4)


def test_only_the_needed_tensors_are_read_and_only_their_files_opened(whole, reads):
    folder, model = whole
    load_encoder(str(folder), layer=-3, device="cpu")  # two of four layers
    needed = [
        key
        for key in model.state_dict()
        if key.startswith(("model.language_model.embed_tokens.", "model.language_model.layers.0.", "model.language_model.layers.1."))
    ]  # fmt: skip
    assert sorted(key for _, key in reads["tensors"]) == sorted(
        needed
    )  # each once; no vision, MTP, upper layer, head, norm
    assert set(reads["files"]) == {FILE(1), FILE(2)}
    assert any("visual" in key for key in load_file(folder / FILE(2)))


def test_the_head_opens_its_own_files(whole, reads):
    folder, model = whole
    head = folded_head(open_checkpoint(str(folder)))
    assert {key for _, key in reads["tensors"]} == {"lm_head.weight", "model.language_model.norm.weight"}
    assert set(reads["files"]) == {FILE(3), FILE(5)}
    gain = 1 + model.model.language_model.norm.weight.detach()  # Qwen3.5 stores gain - 1
    expected = (gain * model.lm_head.weight.detach()).T.to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(head.astype(np.float32), expected)


def test_files_of_other_parts_need_not_be_there(whole, tmp_path):
    copy = copied(whole[0], tmp_path, leave_out=(3, 4, 5))
    assert load_encoder(str(copy), device="cpu").info.layer == 2
    with pytest.raises(EncoderError, match=f"{FILE(3)} is missing, although the index names it"):
        load_encoder(str(copy), layer=4, device="cpu")


def test_every_problem_over_several_files_is_in_one_error(whole, tmp_path):
    copy = copied(whole[0], tmp_path)
    prefix, index = "model.language_model.layers", copy / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    one, two = load_file(copy / FILE(1)), load_file(copy / FILE(2))
    del one[f"{prefix}.0.input_layernorm.weight"], weight_map[f"{prefix}.0.input_layernorm.weight"]
    one[f"{prefix}.0.linear_attn.surplus"] = torch.ones(3)
    weight_map[f"{prefix}.0.linear_attn.surplus"] = FILE(1)
    two[f"{prefix}.1.linear_attn.out_proj.weight"] = torch.ones(5, 64)
    two[f"{prefix}.1.linear_attn.in_proj_z.weight"][3, 3] = torch.nan
    save_file(one, copy / FILE(1))
    save_file(two, copy / FILE(2))
    index.write_text(json.dumps({"weight_map": weight_map}))
    for weights in ("auto", "int8"):
        if weights != "auto":
            pytest.importorskip("bitsandbytes")
        with pytest.raises(EncoderError) as caught:
            load_encoder(str(copy), device="cpu", weights=weights)
        for part in (
            "4 problems",
            "missing: layers.0.input_layernorm.weight",
            "unexpected: layers.0.linear_attn.surplus",
            "wrong shape: layers.1.linear_attn.out_proj.weight is (5, 64), not (64, 64)",
            "not finite: layers.1.linear_attn.in_proj_z.weight",
        ):
            assert part in str(caught.value)


def test_every_bad_file_is_in_one_error(whole, tmp_path):
    copy = copied(whole[0], tmp_path)
    (copy / FILE(1)).write_bytes((copy / FILE(1)).read_bytes()[:-100])
    two = load_file(copy / FILE(2))
    del two["model.language_model.layers.1.linear_attn.A_log"]
    save_file(two, copy / FILE(2))
    (copy / FILE(3)).unlink()
    with pytest.raises(EncoderError) as caught:
        load_encoder(str(copy), layer=4, device="cpu")
    for part in (
        f"{FILE(1)} is truncated",
        f"{FILE(2)} lacks model.language_model.layers.1.linear_attn.A_log, which the index promises",
        f"{FILE(3)} is missing",
    ):
        assert part in str(caught.value)


def test_an_index_of_pickles_is_refused(whole, tmp_path):
    copy = copied(whole[0], tmp_path)
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(".safetensors", ".bin"))
    with pytest.raises(EncoderError, match="names pickled files .* never read"):
        load_encoder(str(copy), device="cpu")


# Memory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """(folder, bytes of the lower two layers and the embedding): 177 MB in bfloat16, in two files."""
    folder = tmp_path_factory.mktemp("large")
    config = text_config("llama", 2048, 4)
    config.head_dim, config.intermediate_size, config.dtype = 256, 6144, torch.bfloat16
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    weights = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    needed = loading.needed_keys(weights, 2, 4)
    for file, keys in (("a.safetensors", needed), ("b.safetensors", weights.keys() - set(needed))):
        save_file({key: weights[key] for key in keys}, folder / file)
    weight_map = {key: "a.safetensors" if key in needed else "b.safetensors" for key in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return folder, sum(weights[key].nbytes for key in needed)


class PeakMemory:
    """Most memory of this process that belongs to no file, above what there was before, looked at every millisecond."""

    def __enter__(self):
        self.before = self.peak = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        self.grown = max(self.peak, anonymous()) - self.before


def anonymous():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 0.0), ("float32", 2.0)])
def test_no_second_copy_is_made_in_memory(large, dtype, copies):
    """In the file's own dtype the weights stay mapped; in float32 they are there once, at twice the bytes."""
    folder, size = large
    load_encoder("tiny-llama", layer=1, device="cpu")  # imports are not counted
    with PeakMemory() as memory:
        encoder = load_encoder(str(folder), layer=2, device="cpu", dtype=dtype)
    assert encoder.info.layer == 2
    assert size > 170e6
    # The checks look at 4 M weights at a time, in up to 8 bytes each, and other threads of the process allocate too; a
    # second copy would be at least `size` more.
    assert memory.grown < (copies + 0.6) * size, f"{memory.grown / size:.2f} of the file"


# Kernels


def test_missing_kernels_are_named_in_one_line(monkeypatch):
    config = text_config("qwen3_5")  # three linear-attention layers, then a full one
    present = set()
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: name if name in present else None)
    line = loading.missing_kernels(config, 4)
    assert (
        "flash-linear-attention and causal-conv1d not installed, so 3 linear-attention layers" in line
        and "\n" not in line
    )
    assert "so 2 linear" in loading.missing_kernels(config, 2)
    present.add("fla")
    assert "encoder: causal-conv1d not installed" in loading.missing_kernels(config, 4)
    present.add("causal_conv1d")
    assert loading.missing_kernels(config, 4) is None
    present.clear()
    assert loading.missing_kernels(text_config("llama"), 4) is None


def test_transformers_own_warnings_are_not_repeated(caplog, capfd):
    encoder = load_encoder("tiny-qwen3_5", device="cpu")
    encoder.states(IDS, LENGTHS)
    assert "falling back" not in capfd.readouterr().err + caplog.text


def copied(source, target, leave_out=()):
    folder = target / "copy"
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in [FILE(number) for number in leave_out]:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
