"""A model over several devices: what is asked of accelerate, and that offloaded weights give the same states and digest.

There is no GPU in these tests.  What can be tested without one is the machinery: accelerate's hooks, which bring a layer's
weights when it runs, with the CPU as the device they are brought to, and where accelerate would put the layers.
"""

import accelerate
import numpy as np
import pytest
import torch

from jdllm.config import ConfigError, preset
from weights_port import loading
from weights_port.checkpoints import EncoderError, open_checkpoint
from weights_port.encoder import load_encoder
from weights_port.placement import Placement, resolve_placement

IDS = np.random.default_rng(0).integers(0, 256, (3, 19)).astype(np.int32)
LENGTHS = np.array([19, 7, 1])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_weights_that_come_when_they_are_used_give_the_same_states_and_digest(kind):
    encoder = load_encoder(f"tiny-{kind}", device="cpu")
    states, digest = encoder.states(IDS, LENGTHS), encoder.info.identity["weights"]
    accelerate.cpu_offload(encoder._model, execution_device=torch.device("cpu"))
    assert all(value.is_meta for value in encoder._model.parameters())
    torch.testing.assert_close(encoder.states(IDS, LENGTHS), states, atol=0, rtol=0)
    torch.testing.assert_close(encoder.states(IDS, LENGTHS), states, atol=0, rtol=0)  # the hooks survive the early stop
    assert loading.fingerprint(encoder._model) == digest
    assert all(loading.all_finite(value) and not value.is_meta for _, value in loading.weights_of(encoder._model))
    assert all(value.is_meta for value in encoder._model.parameters())


def test_no_block_is_split_and_what_does_not_fit_stays_on_the_cpu():
    """accelerate's own plan for the skeleton, with the memory of two imaginary GPUs that hold one block each."""
    model = loading.skeleton(open_checkpoint("tiny-qwen3_5"), 4)
    block = max(sum(value.nbytes for value in layer.parameters()) for layer in model.layers)
    room = {0: int(2.5 * block), 1: int(1.5 * block), "cpu": 10**9}
    devices = accelerate.infer_auto_device_map(model, room, no_split_module_classes=model._no_split_modules)
    at = [devices[f"layers.{layer}"] for layer in range(4)]
    assert {0, 1, "cpu"} >= set(at) and at[-1] == "cpu" and 1 in at
    order = [[0, 1, "cpu"].index(device) for device in at]
    assert order == sorted(order)
    assert not any(name.startswith("layers.") and name.count(".") > 1 for name in devices)


def test_spread_asks_for_all_gpus_within_the_limit(monkeypatch):
    with pytest.raises(EncoderError, match="encoder_device='spread' needs a GPU"):
        resolve_placement("spread")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {0: 10**11, 1: 10**11, "cpu": 5 * 10**10})
    placement = resolve_placement("spread", 20.0)
    assert placement.device == torch.device("cuda", 0) and str(placement) == "all GPUs and the CPU's memory"
    limits = {0: 20 * 10**9, 1: 20 * 10**9, "cpu": 5 * 10**10}
    assert placement.options() == {"device_map": "auto", "max_memory": limits}
    assert resolve_placement("spread").options() == {"device_map": "auto"}
    assert resolve_placement("auto").options() == {"device_map": {"": torch.device("cuda")}}
    assert Placement(torch.device("cpu")).options() == {}


def test_packed_weights_are_not_spread(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(EncoderError, match="encoder_weights=int8 cannot be spread"):
        load_encoder("tiny-llama", device="spread", weights="int8")
    with pytest.raises(ConfigError, match="feed.encoder_weights=nf4 cannot be spread"):
        preset("smoke").replace(feed__encoder_weights="nf4", feed__encoder_device="spread")
    for changes in ({"feed__encoder_memory": 8.0}, {"feed__encoder_memory": 0.0, "feed__encoder_device": "spread"}):
        with pytest.raises(ConfigError, match="limits feed.encoder_device=spread"):
            preset("smoke").replace(**changes)
