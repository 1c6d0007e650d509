"""Re-rank the candidates of any RecBole retriever with a reasoning language model (Diffusion-GR2)."""

from recbole_dgr2 import compat

__version__ = "0.1.0"

# RecBole breaks on current releases of its own dependencies; mended here, before anything imports it.
compat.apply()
