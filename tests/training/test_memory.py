"""The estimate of a step's memory beside XLA's own account on the CPU, and the account itself: nothing is there twice.

One small shape is compiled here.  `python experiments/measure_memory.py --toy --grid` compiles many, with rematerialisation,
accumulation and a frozen head among them, and prints the error of each.
"""

import pytest

from jdllm.config import preset
from jdllm.training.memory import ask_xla, batch_shapes, held_bytes, memory, state_shapes


@pytest.fixture(scope="module")
def compiled():
    """A config and what XLA says of its step."""
    config = preset("smoke").replace(
        model__num_tokens=32, model__num_latents=32, model__latent_dim=128, model__hidden_dim=96, model__vocab_size=512,
        model__encoder_depth=1, model__decoder_depth=1, model__denoiser_depth=1, model__token_decoder_depth=1,
        training__batch_size=32,
    )  # fmt: skip
    return config, ask_xla(config)


def test_the_estimate_is_within_a_fifth_of_xlas_account(compiled):
    config, account = compiled
    assert memory(config, "cpu").step == pytest.approx(account.temporary, rel=0.2)


def test_the_step_gives_its_state_away(compiled):
    """All of the state is updated in place, so no second copy of it is ever there."""
    config, account = compiled
    state = held_bytes(state_shapes(config))
    assert account.donated >= state and account.outputs - account.donated < 10_000
    arguments = state + held_bytes(batch_shapes(config, config.training.batch_size))
    assert account.arguments == pytest.approx(arguments, rel=0.001)
    assert account.peak == account.arguments + account.temporary + account.outputs - account.donated
