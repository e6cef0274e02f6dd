"""Text sources, windows of tokens, the hidden-state cache on disk, and the loader that feeds training.

Everything here is NumPy: no JAX, no torch.  The frozen model that fills the cache lives in weights_port.
"""
