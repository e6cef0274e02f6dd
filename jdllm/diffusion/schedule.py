"""Noise schedules for variance-preserving diffusion.  tau = 0 is clean, tau = 1 is noise."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class TangentSchedule:
    """alpha_bar(tau) = 1 / (1 + d^2 tan^2(pi tau / 2)); d = 1 is the cosine schedule (TEncDM, arXiv 2402.19097)."""

    d: float = 3.0

    def alpha_sigma(self, tau: Float[Array, "*b"]) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
        """Signal and noise amplitudes, z_tau = alpha z + sigma epsilon; alpha**2 + sigma**2 == 1.

        Written with sine and cosine, since the tangent is infinite at tau = 1: there alpha is 0 and sigma 1, exactly.
        """
        signal = jnp.where(tau >= 1.0, 0.0, jnp.cos(0.5 * jnp.pi * tau))
        noise = self.d * jnp.sin(0.5 * jnp.pi * tau)
        scale = jax.lax.rsqrt(signal * signal + noise * noise)
        return signal * scale, noise * scale

    def add_noise(
        self, z: Float[Array, "b k d"], tau: Float[Array, " b"], epsilon: Float[Array, "b k d"]
    ) -> Float[Array, "b k d"]:
        """z_tau of each row at its own time."""
        alpha, sigma = self.alpha_sigma(tau)
        return alpha[:, None, None] * z + sigma[:, None, None] * epsilon
