"""dflash: train DFlash (block-diffusion) drafters for speculative decoding of a frozen LLM."""

__version__ = "0.1.0"
