"""Measures of a trained run: what it reconstructs, how it denoises, and its samples beside human text."""
