"""Decoding: autoregressive, block-parallel and speculative, batched, on one key-value cache."""

from recbole_dgr2.decode.engine import decode
from recbole_dgr2.decode.types import (
    Completion,
    DecodeOptions,
    DecodeResult,
    DecodingTrace,
    Request,
    Speculation,
)

__all__ = ["Completion", "DecodeOptions", "DecodeResult", "DecodingTrace", "Request", "Speculation", "decode"]
