"""What decoding takes and gives: options, requests, completions with their traces, and the sums over a run.

Nothing here knows of RecBole, of transformers or of text: a request is token ids, a completion is token ids.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["autoregressive", "block", "speculative", "auto"]
MODES: tuple[str, ...] = get_args(Mode)
Rule = Literal["threshold", "static", "factor", "entropy"]
RULES: tuple[str, ...] = get_args(Rule)
NEVER = -1  # the step of a slot that no pass committed


def _integer(name: str, value: object, least: int) -> None:
    """Refuse anything but an int of at least `least` (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode. Every field is checked when the object is made (ValueError, one line).

    mode: "autoregressive" commits one token a pass; "block" commits whole parts of a block a pass; "speculative" gives
        the autoregressive output in fewer passes; "auto" measures this machine and takes the quickest (`decode.auto`).
    max_new_tokens: most tokens a completion may have, the end-of-sequence token included.
    batch_size: rows that share a forward pass.
    tau: confidence threshold in (0, 1]: in mode "block" a masked slot is committed when its top probability reaches it,
        in mode "speculative" such a draft is shown to the next one.
    block_size: block length at decoding (of drafts in mode "speculative"), at most the trained one; None takes the
        trained one.
    temperature: 0 takes the most likely token (confidence at temperature 1); above 0 samples at that temperature,
        and confidences are those of the tempered distribution.
    seed: of the random numbers; a sample depends on (seed, request key, position, step) only.
    rule, rule_value: which slots of a block a pass commits (`decode.commit`). "threshold": see tau, no value; "static":
        value = passes a block; "factor": its factor f; "entropy": its bound in nats.
    token_cost: what one more token adds to a forward, as a share of its fixed cost; longer drafts pay where it is
        small. "auto" measures it.
    label_ids: tokens of the candidate labels. Given (mode "block" only), the labels of the ranked list at the end of
        an answer are assigned so that none occurs twice (`decode.assignment`); the trace keeps the raw tokens.
    exact: of mode "auto": only ways that give the autoregressive output are considered; False (mode "auto" only) also
        considers block decoding by `tau` or `rule`, whose answers may differ, from one call to the next too.
    """

    mode: Mode
    max_new_tokens: int
    batch_size: int
    tau: float = 0.9
    block_size: int | None = None
    temperature: float = 0.0
    seed: int = 0
    rule: Rule = "threshold"
    rule_value: float | None = None
    token_cost: float = 0.02
    label_ids: tuple[int, ...] = ()
    exact: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("batch_size", self.batch_size, 1)
        _integer("seed", self.seed, 0)
        if self.block_size is not None:
            _integer("block_size", self.block_size, 1)
        if not 0.0 < self.tau <= 1.0:
            raise ValueError(f"tau must be in (0, 1], got {self.tau!r}; the usual value is 0.9")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}")
        if not (math.isfinite(self.token_cost) and self.token_cost > 0.0):
            raise ValueError(f"token_cost must be a positive number, got {self.token_cost!r}")
        self._check_rule()
        if self.label_ids and self.mode != "block":
            raise ValueError(f"label_ids need mode 'block', got mode {self.mode!r}")
        if len(set(self.label_ids)) != len(self.label_ids):
            raise ValueError(f"label_ids must be different tokens, got {self.label_ids!r}")
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact must be True or False, got {self.exact!r}")
        if not self.exact and self.mode != "auto":
            raise ValueError(f"exact={self.exact!r} needs mode 'auto', got mode {self.mode!r}")

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        value = self.rule_value
        if self.rule == "threshold":
            if value is not None:
                raise ValueError(f"rule_value {value!r}: rule 'threshold' takes none, its threshold is tau")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"rule_value must be a positive number for rule {self.rule!r}, got {value!r}")
        elif self.rule == "static" and value != int(value):
            raise ValueError(f"rule_value of rule 'static' is a whole number of passes, got {value!r}")


@dataclass(frozen=True)
class Request:
    """One prompt. `key` names it and keys its random numbers; equal keys draw equal random numbers."""

    key: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class DecodingTrace:
    """Everything a replay needs to rebuild each canvas of one completion. All tuples have one entry a slot.

    tokens: token of every slot of every started block, those after the end of the sequence included; the mask id (or
        0 for a model without one) where `steps` is -1.
    steps: denoising pass of its block, from 1, that committed the slot; 0 for a seed (slot 0 of a block, taken from the
        clean stream); -1 for a slot still masked when the row stopped. The canvas of a block before its pass s shows
        the slots with 0 <= step < s.
    log_probs: natural log-probability of the token when it was committed, at `temperature` (at 1 when that is 0).
    confidences: top probability of the same distribution. Both are 0 where `steps` is -1.
    block_size, tau, temperature: the rule the row was decoded with; block_size is 1 for autoregressive decoding, and
        for speculative decoding, whose trace is the autoregressive one.
    passes: pass of the row, from 1, that gave the token; 0 for the prefill; -1 where `steps` is -1.
    """

    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    log_probs: tuple[float, ...]
    confidences: tuple[float, ...]
    block_size: int
    tau: float
    temperature: float
    passes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Speculation:
    """What drafts were worth, one entry a pass of the row in each tuple.

    checked: draft tokens that the pass verified; 0 for a pass that only drafted. accepted: those of them that stood.
    queries: tokens that the row fed into the pass.
    """

    checked: tuple[int, ...]
    accepted: tuple[int, ...]
    queries: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One answer.

    token_ids: generated tokens up to and including the first end-of-sequence token, at most max_new_tokens.
    finished: the end-of-sequence token was reached within max_new_tokens.
    passes: forwards after prefill that this row took part in: denoising and commit passes, drafts and verifications.
    speculation: of speculative decoding, else None.
    """

    key: int
    token_ids: tuple[int, ...]
    finished: bool
    passes: int
    trace: DecodingTrace
    speculation: Speculation | None = None


@dataclass(frozen=True)
class DecodeResult:
    """Completions in the order of the requests, and the wall time spent in prefill and in decoding (seconds).

    reason: of mode "auto", what it chose and why; empty otherwise.
    """

    completions: tuple[Completion, ...]
    prefill_seconds: float
    decode_seconds: float
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Generated tokens up to and including the end of each sequence, over all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def passes(self) -> int:
        """Sum of the rows' passes (NFE): a forward shared by k rows counts k."""
        return sum(completion.passes for completion in self.completions)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per pass of a row; 0 when no row needed a pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def queries(self) -> dict[int, int]:
        """Number of passes by the tokens that a row fed into them; empty where the traces do not say."""
        counts: Counter[int] = Counter()
        for completion in self.completions:
            if completion.speculation is not None:
                counts.update(completion.speculation.queries)
            elif completion.trace.passes:
                counts[completion.trace.block_size] += completion.passes
        return dict(counts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, prefill apart; 0 when nothing was decoded."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified draft tokens that stood; 0 where none was verified."""
        drafts = [c.speculation for c in self.completions if c.speculation is not None]
        checked = sum(sum(one.checked) for one in drafts)
        return sum(sum(one.accepted) for one in drafts) / checked if checked else 0.0
