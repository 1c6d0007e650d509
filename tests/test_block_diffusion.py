"""The layout: mask against a predicate for single slots, positions, where slots are scored, its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.model.block_diffusion import (
    BlockDiffusionSpec,
    Layout,
    block_index,
    extend_to_block,
)
from tests.layouts import lay_out
from tests.tiny import EOS_ID, MASK_ID, padded, random_tokens


def _layout(
    prompts: list[int],
    responses: list[int],
    spec: BlockDiffusionSpec,
    copies: int = 2,
    anchor: list[int] | None = None,
) -> Layout:
    prompt, prompt_length = padded(random_tokens(prompts, seed=1))
    response, response_length = padded(random_tokens(responses, seed=2))
    anchors = torch.tensor(anchor or [0] * len(prompts))
    _, is_slot0 = block_index(response.shape[1], spec.block_size, anchors)
    draw = torch.rand(len(prompts), copies, response.shape[1], generator=torch.Generator().manual_seed(3))
    masked = (draw < 0.5) & ~is_slot0[:, None]
    return lay_out(prompt, prompt_length, response, response_length, spec=spec, masked=masked, anchor=anchors)


def _block(slot: int, size: int, anchor: int) -> int:
    first = anchor or size
    return 0 if slot < first else 1 + (slot - first) // size


def test_block_index_by_hand() -> None:
    block_of, is_slot0 = block_index(7, 3, torch.tensor([0, 1, 2]))
    assert block_of.tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2]]
    starts = [[i for i, x in enumerate(row) if x] for row in is_slot0.tolist()]
    assert starts == [[0, 3, 6], [0, 1, 4], [0, 2, 5]]


@given(
    context=st.sampled_from(["causal", "block"]),
    size=st.integers(1, 4),
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=3),
    copies=st.integers(0, 2),
)
@settings(max_examples=40)
def test_mask_is_the_predicate(
    context: Any, size: int, rows: list[tuple[int, int, int]], copies: int
) -> None:
    """allowed(q, k) for single slots: prompt causal, clean by context, noisy its block and before."""
    prompts, responses, anchors = ([row[i] for row in rows] for i in range(3))
    anchors = [a % size for a in anchors]
    layout = _layout(prompts, responses, BlockDiffusionSpec(size, MASK_ID, context), copies, anchors)
    width, length = max(prompts), max(responses)
    where = [("P", i) for i in range(width)]
    where += [(stream, i) for stream in ["C", *range(copies)] for i in range(length)]
    for row, (p, r, a) in enumerate(zip(prompts, responses, anchors, strict=True)):
        for q, (stream_q, i) in enumerate(where):
            for k, (stream_k, j) in enumerate(where):
                if stream_k == "P":
                    expected = j < p and (stream_q != "P" or j <= i)
                elif stream_q == "P" or j >= r:
                    expected = False
                else:
                    here, there = _block(i, size, a), _block(j, size, a)
                    if stream_q == "C":
                        expected = stream_k == "C" and (j <= i if context == "causal" else there <= here)
                    else:
                        expected = there < here if stream_k == "C" else stream_q == stream_k and there == here
                assert layout.allowed[row, q, k] == (expected or q == k), (row, where[q], where[k])


def test_ids_positions_and_sources_by_hand() -> None:
    spec = BlockDiffusionSpec(block_size=2, mask_id=MASK_ID)
    prompt, prompt_length = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([3, 1])
    response, response_length = torch.tensor([[11, 12, 13], [14, 15, 0]]), torch.tensor([3, 2])
    masked = torch.tensor([[[False, True, False]], [[False, True, False]]])
    layout = lay_out(prompt, prompt_length, response, response_length, spec=spec, masked=masked)
    assert layout.ids.tolist() == [
        [5, 6, 7, 11, 12, 13, 11, MASK_ID, 13],
        [8, 0, 0, 14, 15, 0, 14, MASK_ID, 0],
    ]
    assert layout.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert layout.positions[1, 3:].tolist() == [1, 2, 3, 1, 2, 3], (
        "the response starts at the row's own length"
    )
    assert layout.clean_source.tolist() == [[2, 3, 4], [0, 3, 4]]
    # slot 0 of both blocks from the clean stream, slot 1 from the noisy slot before it
    assert layout.source.tolist() == [[[2, 6, 4]], [[0, 6, 4]]]
    assert layout.real.tolist() == [[True, True, True], [True, True, False]]
    assert layout.clean_scorable.tolist() == layout.real.tolist()


def test_block_context_scores_only_slot0_from_the_clean_stream() -> None:
    layout = _layout([3], [6], BlockDiffusionSpec(3, MASK_ID, "block"))
    assert layout.clean_scorable.tolist() == [[True, False, False, True, False, False]]


def test_a_literal_mask_id_is_ordinary_text() -> None:
    spec = BlockDiffusionSpec(2, MASK_ID)
    prompt, response = torch.tensor([[MASK_ID, 5]]), torch.tensor([[MASK_ID, 6]])
    two = torch.tensor([2])
    none = torch.zeros(1, 1, 2, dtype=torch.bool)
    layout = lay_out(prompt, two, response, two, spec=spec, masked=none)
    assert layout.ids.tolist() == [[MASK_ID, 5, MASK_ID, 6, MASK_ID, 6]]
    assert bool(layout.allowed[0, 1, 0]) and bool(layout.allowed[0, 5, 4])


def test_no_copy_is_plain_autoregressive() -> None:
    spec = BlockDiffusionSpec(4, MASK_ID)
    prompt, response = torch.tensor([[5, 6]]), torch.tensor([[7, 8, 9]])
    layout = lay_out(prompt, torch.tensor([2]), response, torch.tensor([3]), spec=spec)
    assert torch.equal(layout.allowed[0], torch.ones(5, 5, dtype=torch.bool).tril())
    assert layout.source.shape == (1, 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_length": torch.tensor([0])}, "at least one token"),
        ({"masked": torch.ones(1, 1, 3, dtype=torch.bool)}, "slot 0"),
        ({"masked": torch.zeros(1, 1, 2, dtype=torch.bool)}, r"\[1, K, 3\]"),
        ({"masked": torch.zeros(1, 3, dtype=torch.bool)}, r"\[1, K, 3\]"),
        ({"anchor": torch.tensor([2])}, r"in \[0, 2\)"),
    ],
)
def test_bad_layout(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "prompt": torch.tensor([[5, 6]]),
        "prompt_length": torch.tensor([2]),
        "response": torch.tensor([[7, 8, 9]]),
        "response_length": torch.tensor([3]),
        "spec": BlockDiffusionSpec(2, MASK_ID),
    }
    lay_out(**good)
    with pytest.raises(ValueError, match=message):
        lay_out(**good | change)


def test_spec_round_trip_and_disagreement() -> None:
    spec = BlockDiffusionSpec(32, 151669, "block")
    assert BlockDiffusionSpec.from_dict(spec.to_dict()) == spec
    spec.check(BlockDiffusionSpec(32, 151669, "block"))
    for other, named in (
        (BlockDiffusionSpec(16, 151669, "block"), "block_size.*32.*16"),
        (BlockDiffusionSpec(32, 7, "block"), "mask_id.*151669.*7"),
        (BlockDiffusionSpec(32, 151669), "context.*block.*causal"),
    ):
        with pytest.raises(ValueError, match=named):
            spec.check(other)
    for values, named in (
        ({"block_size": 0, "mask_id": 1}, "block_size"),
        ({"block_size": 2.0, "mask_id": 1}, "block_size"),
        ({"block_size": 2, "mask_id": -1}, "mask_id"),
        ({"block_size": 2, "mask_id": 1, "context": "full"}, "context.*causal"),
    ):
        with pytest.raises(ValueError, match=named):
            BlockDiffusionSpec(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shift"):
        BlockDiffusionSpec.from_dict(spec.to_dict() | {"shift": 1})


class TestExtendToBlock:
    """EOS: labelled once, filled to the end of its block only, never added to a truncated response."""

    def test_by_hand(self) -> None:
        rows = [[5, 6, EOS_ID], [5, 6, 7, EOS_ID], [5, 6, 7, 8, 9], [EOS_ID]]
        response, length = padded(rows)
        answer = torch.zeros_like(response, dtype=torch.bool)
        answer[:, 1:3] = True
        extended = extend_to_block(response, length, answer, EOS_ID, 4)
        e = EOS_ID
        assert extended.response_length.tolist() == [4, 4, 5, 4]
        assert extended.response[0, :4].tolist() == [5, 6, e, e]
        assert extended.response[2, :5].tolist() == [5, 6, 7, 8, 9]
        assert extended.response[3, :4].tolist() == [e, e, e, e]
        assert extended.fill.sum(dim=1).tolist() == [1, 0, 0, 3]
        assert extended.labelled_clean.sum(dim=1).tolist() == [3, 4, 5, 1]
        assert not bool((extended.answer & extended.fill).any())
        assert extended.answer.sum(dim=1).tolist() == [2, 2, 2, 0]

    def test_anchor_moves_the_end(self) -> None:
        response, length = padded([[5, 6, EOS_ID]] * 4)
        answer = torch.zeros_like(response, dtype=torch.bool)
        extended = extend_to_block(response, length, answer, EOS_ID, 4, torch.tensor([0, 1, 2, 3]))
        assert extended.response_length.tolist() == [4, 5, 6, 3]

    def test_what_follows_the_first_eos_is_dropped(self) -> None:
        response, length = padded([[5, EOS_ID, 6, EOS_ID, 7, 8]])
        answer = torch.ones_like(response, dtype=torch.bool)
        extended = extend_to_block(response, length, answer, EOS_ID, 3)
        assert extended.response_length.tolist() == [3]
        assert extended.response[0, :3].tolist() == [5, EOS_ID, EOS_ID]
        assert extended.answer[0].tolist() == [True, True, False, False, False, False]

    def test_padding_is_no_eos_even_when_pad_equals_eos(self) -> None:
        response, length = padded([[5, 6, 7], [5, 6, 7, 8, EOS_ID]], pad=EOS_ID)
        extended = extend_to_block(response, length, torch.zeros_like(response, dtype=torch.bool), EOS_ID, 4)
        assert extended.response_length.tolist() == [3, 8], "a truncated row gets no EOS"

    @given(
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        size=st.integers(1, 6),
        extra=st.integers(0, 5),
        data=st.data(),
    )
    @settings(max_examples=50)
    def test_properties(self, lengths: list[int], size: int, extra: int, data: st.DataObject) -> None:
        """The fill ends its block, is less than a block, and padding changes nothing."""
        rows = [[*row[:-1], EOS_ID] for row in random_tokens(lengths)]
        anchor = torch.tensor([data.draw(st.integers(0, size - 1)) for _ in rows])
        results = []
        for width in (0, max(lengths) + extra):
            response, length = padded(rows, width=width)
            answer = torch.zeros_like(response, dtype=torch.bool)
            results.append(extend_to_block(response, length, answer, EOS_ID, size, anchor))
        short, wide = results
        assert torch.equal(short.response_length, wide.response_length)
        for row in range(len(rows)):
            end = int(short.response_length[row])
            assert torch.equal(short.response[row, :end], wide.response[row, :end])
            assert 0 <= end - lengths[row] < size
            block_of, is_slot0 = block_index(end + 1, size, anchor[row : row + 1])
            assert bool(is_slot0[0, end]) and block_of[0, end - 1] == block_of[0, lengths[row] - 1]
            assert (short.response[row, lengths[row] - 1 : end] == EOS_ID).all()
