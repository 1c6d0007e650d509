"""Decoding: autoregressive and block-parallel, batched, on one key-value cache."""

from recbole_dgr2.decode.engine import decode
from recbole_dgr2.decode.types import (
    Completion,
    DecodeOptions,
    DecodeResult,
    DecodingTrace,
    Request,
)

__all__ = ["Completion", "DecodeOptions", "DecodeResult", "DecodingTrace", "Request", "decode"]
