"""Decoders in turn on the same weights and the same prompts: speed, and the quality of the outputs that were timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from recbole_dgr2.data.ranking import Ranking, parse_ranking
from recbole_dgr2.decode import DecodeOptions, DecodeResult, Request, decode
from recbole_dgr2.decode.auto import settle
from recbole_dgr2.decode.costs import measure_pass_costs
from recbole_dgr2.decode.outside import generate
from recbole_dgr2.decode.synchronised import synchronised
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.pipeline.work import Lists, Work
from recbole_dgr2.report.speed import quality_entry, speed_entry
from recbole_dgr2.report.throughput import measure
from recbole_dgr2.report.trace_view import View, view_of

AR: Final = "autoregressive"
GENERATE: Final = "generate"
SYNCHRONISED: Final = "synchronised"

Decoder = Callable[[Sequence[Request]], DecodeResult]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contender:
    """A decoder by name: a mode of `decode` with its options, or one of the outside references."""

    name: str
    mode: str
    options: Mapping[str, Any]


def contender(name: str) -> Contender:
    """`block 0.9` (tau), `block 0.9/16` (and block length), `block factor=1`, `speculative 16`, `synchronised 0.9`, or
    `auto any`, which unlike `auto` may take a way that is not exact.

    Raises:
        ValueError: not of these forms.
    """
    mode, _, rest = name.partition(" ")
    if not rest:
        return Contender(name, mode, {})
    if name == "auto any":
        return Contender(name, mode, {"exact": False})
    try:
        if mode == "speculative":
            return Contender(name, mode, {"block_size": int(rest)})
        if "=" in rest:
            rule, _, value = rest.partition("=")
            return Contender(name, mode, {"rule": rule, "rule_value": float(value)})
        tau, _, length = rest.partition("/")
        return Contender(name, mode, {"tau": float(tau)} | ({"block_size": int(length)} if length else {}))
    except ValueError:
        raise ValueError(
            f"decoder {name!r}: expected e.g. 'block 0.9', 'block 0.9/16', 'block factor=1', 'speculative 16'"
        ) from None


@dataclass(frozen=True)
class Bench:
    """One model and how it is timed."""

    backbone: Backbone
    spec: BlockDiffusionSpec
    base: DecodeOptions
    rounds: int

    def decoder(self, name: str, base: DecodeOptions) -> Decoder:
        """The decoder of that name (see `contender`), as a function of requests."""
        one = contender(name)
        model, eos_id = self.backbone.model, self.backbone.eos_id
        if one.mode == GENERATE:
            return lambda requests: generate(model, requests, base, eos_id, self.spec.mask_id)
        if one.mode == SYNCHRONISED:
            blocks = replace(base, mode="block", **one.options)
            return lambda requests: synchronised(model, requests, blocks, eos_id, self.spec)
        options = replace(base, mode=one.mode, **one.options)  # type: ignore[arg-type]
        return lambda requests: decode(model, requests, options, eos_id=eos_id, spec=self.spec)

    def entries(
        self, names: Sequence[str], work: Work, base: DecodeOptions, **setting: Any
    ) -> list[dict[str, Any]]:
        """Speed and quality of each named decoder on the work, `AR` first among them.

        "auto" is timed once it has made up its mind; `first_call` is its tokens a second before that, else None.
        """
        logger.info("%s: %s, %d requests", setting or "modes", ", ".join(names), len(work.requests))
        decoders = {name: self.decoder(name, base) for name in names}
        autos = [name for name in names if contender(name).mode == "auto"]
        first = {name: settle(decoders[name], work.requests).tokens_per_second for name in autos}
        speeds = measure(decoders, work.requests, baseline=AR, rounds=self.rounds)
        outcomes = {name: speed.outcome for name, speed in speeds.items()}
        return [
            {
                "decoder": name,
                "batch": base.batch_size,
                "reason": outcomes[name].reason,
                "queries": outcomes[name].queries,
                "acceptance": outcomes[name].acceptance_rate,
                "first_call": first.get(name),
                **setting,
                **speed_entry(speed),
                **self.quality(outcomes[name], outcomes[AR], work),
            }
            for name, speed in speeds.items()
        ]

    def quality(self, own: DecodeResult, baseline: DecodeResult, work: Work) -> dict[str, Any]:
        """Quality of one decoder's outputs, beside those of autoregressive decoding."""
        rankings = [self._rankings(result, work) for result in (own, baseline)]
        outputs = [[completion.token_ids for completion in one.completions] for one in (own, baseline)]
        return quality_entry(outputs[0], outputs[1], (rankings[0], rankings[1]), work.targets, self.base.seed)

    def qualities(self, names: Sequence[str], lists: Lists, batch: int) -> list[dict[str, Any]]:
        """Quality of each named decoder, untimed: validity and equality on users, accuracy on hits."""
        base = replace(self.base, batch_size=batch)
        found: dict[str, dict[str, DecodeResult]] = {}
        for name in names:
            logger.info("quality: %s", name)
            decoder = self.decoder(name, base)
            found[name] = {
                kind: decoder(work.requests) for kind, work in vars(lists).items() if work.requests
            }
        entries = []
        for name in names:
            users = self.quality(found[name]["users"], found[AR]["users"], lists.users)
            hits: dict[str, Any] = {"hits": 0}
            if lists.hits.requests:
                hits = self.quality(found[name]["hits"], found[AR]["hits"], lists.hits)
            entry: dict[str, Any] = {"decoder": name, "users": len(lists.users.requests)}
            entry["tokens_per_pass"] = found[name]["users"].tokens_per_forward
            entry |= {key: users[key] for key in ("equal_to_ar", "valid_rate", "valid_ci95", "failures")}
            entry |= {key: hits[key] for key in ("hits", "metrics", "ci95", "difference") if key in hits}
            entries.append(entry)
        return entries

    def _rankings(self, result: DecodeResult, work: Work) -> list[Ranking]:
        return [
            parse_ranking(self.text(completion.token_ids), n, completion.finished)
            for completion, n in zip(result.completions, work.candidates, strict=True)
        ]

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, the end token left out."""
        backbone = self.backbone
        return str(backbone.tokenizer.decode([token for token in token_ids if token != backbone.eos_id]))

    def after(self, length: int, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Speed-ups that the same passes would give after `length` tokens: each pass at its measured cost.

        A model trained on short prompts says nothing sensible after long ones, and what degenerates decodes fastest;
        the cost of a pass does not depend on what it says.
        """
        costs = measure_pass_costs(self.backbone.model, 1, length)
        seconds = {
            entry["decoder"]: sum(count * costs.of(int(q)) for q, count in entry["queries"].items())
            / entry["tokens"]
            for entry in entries
            if entry["queries"]
        }
        speedup = {name: seconds[AR] / own for name, own in seconds.items()}
        return {"input": length, "speedup": speedup, **asdict(costs)}

    def views(self, request: Request, names: Sequence[str]) -> list[View]:
        """One request decoded by each named decoder, for the eye."""
        found = []
        for name in names:
            (answer,) = self.decoder(name, self.base)([request]).completions
            title = f"{name}: {len(answer.token_ids)} tokens in {answer.passes} passes"
            found.append(view_of(answer.trace, len(answer.token_ids), self._word, title))
        return found

    def _word(self, token: int) -> str:
        return str(self.backbone.tokenizer.decode([token]))
