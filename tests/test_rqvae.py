"""The RQ-VAE: its codebooks by hand, clusters recovered, codes used, the same seed the same codes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.quantized import CodeOptions, nearest_codes
from recbole_dgr2.data.rqvae import RQVAE, Codebook, RQVAEOptions, rqvae
from tests.clusters import nested, partition

QUICK = RQVAEOptions(latent=6, hidden=32, epochs=40, batch_size=32)
SMALL = CodeOptions(levels=2, codes=4, seed=0)


def test_a_chosen_codeword_follows_the_vectors_that_chose_it() -> None:
    book = Codebook(torch.tensor([[0.0], [10.0]]))
    vectors = torch.tensor([[1.0], [2.0], [3.0]])
    book.follow(vectors, torch.tensor([0, 0, 0]), decay=0.5)
    # counts 0.5 * 1 + 0.5 * 3 = 2, sums 0.5 * 0 + 0.5 * 6 = 3
    assert book.words.tolist() == [[1.5], [10.0]]
    assert book.idle.tolist() == [0, 1]
    for _ in range(60):
        book.follow(vectors, torch.tensor([0, 0, 0]), decay=0.5)
    assert book.words[0, 0] == pytest.approx(2.0, abs=1e-4)
    assert book.words[1, 0] == 10.0


def test_a_dead_codeword_is_put_on_the_vector_that_fits_worst() -> None:
    book = Codebook(torch.tensor([[0.0], [10.0], [20.0]]))
    vectors, codes = torch.tensor([[0.0], [4.0], [1.0]]), torch.tensor([0, 0, 0])
    for _ in range(3):
        book.follow(vectors, codes, decay=1.0)
    assert book.revive(vectors, torch.tensor([0.0, 16.0, 1.0]), patience=4) == 0
    assert book.revive(vectors, torch.tensor([0.0, 16.0, 1.0]), patience=3) == 2
    assert sorted(book.words[1:, 0].tolist()) == [1.0, 4.0]
    assert book.idle.tolist() == [0, 0, 0]


def test_more_dead_codewords_than_vectors() -> None:
    book = Codebook(torch.zeros(5, 2))
    book.idle += 9
    assert book.revive(torch.ones(2, 2), torch.ones(2), patience=1) == 2


def started(options: RQVAEOptions = QUICK) -> tuple[RQVAE, torch.Tensor]:
    vectors = torch.from_numpy(nested()[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = RQVAE(6, options)
    model.start_codebooks(vectors, SMALL)
    return model, vectors


def test_k_means_starts_the_codebooks() -> None:
    model, vectors = started()
    latents, first = model.encode(vectors), model.codebooks[0]
    assert isinstance(first, Codebook) and len(model.codebooks) == 2
    code = nearest_codes(latents, first.words.numpy())
    for number in range(4):
        assert np.allclose(latents[code == number].mean(axis=0), first.words[number], atol=1e-4)


def test_gradient_passes_straight_through_to_the_encoder() -> None:
    model, vectors = started(replace(QUICK, commitment=0.0, diversity=0.0))
    model.eval().loss(vectors).backward()
    layer = model.encoder[0]
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    # the decoder's gradient is taken at the quantised latent, and that is what the encoder gets
    latent = torch.from_numpy(model.encode(vectors))
    whole = torch.zeros_like(latent)
    for book in model.codebooks:
        assert isinstance(book, Codebook)
        whole += book.words[book.distances(latent - whole).argmin(1)]
    whole.requires_grad_(True)
    (model.decoder(whole) - vectors).square().sum(1).mean().backward()
    again = model.encoder(vectors)
    model.encoder.zero_grad()
    again.backward(whole.grad)
    expected = layer.weight.grad.clone()  # type: ignore[union-attr, operator]
    model.zero_grad()
    model.loss(vectors).backward()
    assert torch.allclose(layer.weight.grad, expected, atol=1e-5)  # type: ignore[arg-type]


def test_evaluation_leaves_the_codebooks_alone() -> None:
    model, vectors = started()
    before = [book.words.clone() for book in model.codebooks]  # type: ignore[union-attr, operator]
    model.eval().loss(vectors)
    assert all(
        torch.equal(book.words, old)  # type: ignore[arg-type]
        for book, old in zip(model.codebooks, before, strict=True)
    )
    model.train().loss(vectors)
    assert not torch.equal(model.codebooks[0].words, before[0])  # type: ignore[arg-type]


def test_diversity_is_least_for_equal_usage() -> None:
    base = replace(QUICK, commitment=0.0)
    model, vectors = started(base)
    model.eval()
    without = float(RQVAE.loss(model, vectors).detach())
    model.options = replace(base, diversity=0.0)
    plain = float(model.loss(vectors).detach())
    assert without - plain >= 2 * 0.02 - 1e-6  # K * sum p^2 >= 1 on each of two levels


def test_clusters_are_recovered() -> None:
    vectors, labels = nested()
    found = rqvae(vectors, SMALL, QUICK)
    assert partition(found.codes[:, :1]) == partition(labels[:, :1])


def test_the_error_falls_with_every_level_and_all_codes_are_used() -> None:
    vectors = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    found = rqvae(vectors, CodeOptions(3, 16), replace(QUICK, batch_size=64))
    errors = found.errors()
    assert errors[0] == 1.0 and all(b < a for a, b in pairwise(errors))
    assert len(np.unique(found.codes[:, 0])) >= 15


def test_the_same_seed_gives_the_same_and_no_global_state_moves() -> None:
    vectors, _ = nested()
    state = torch.random.get_rng_state()
    one, two = rqvae(vectors, SMALL, QUICK), rqvae(vectors, SMALL, QUICK)
    assert np.array_equal(one.codes, two.codes) and np.array_equal(one.vectors, two.vectors)
    assert torch.equal(torch.random.get_rng_state(), state)
    other = rqvae(vectors, replace(SMALL, seed=1), QUICK)
    assert not np.array_equal(one.vectors, other.vectors)


@settings(max_examples=8)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(2, 5), st.integers(0, 3))
def test_codes_are_always_unique(items: int, levels: int, codes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-1, 2, (items, 3)).astype(np.float32)  # many duplicates
    found = rqvae(vectors, CodeOptions(levels, codes, seed), replace(QUICK, epochs=3))
    unique = found.unique_codes(codes)
    assert len(partition(unique)) == items
    assert np.array_equal(unique[:, :-1], found.codes[:, :-1])


def test_no_epochs_are_k_means_in_a_random_latent_space() -> None:
    vectors, _ = nested()
    assert rqvae(vectors, SMALL, replace(QUICK, epochs=0)).codes.shape == (len(vectors), 2)


def test_bad_vectors() -> None:
    with pytest.raises(ValueError, match=r"expected vectors \[I, d\]"):
        rqvae(np.zeros((0, 3), dtype=np.float32), SMALL)
    bad = nested()[0]
    bad[3, 2] = np.nan
    with pytest.raises(FloatingPointError, match="RQ-VAE: the loss is nan in epoch 0"):
        rqvae(bad, SMALL, QUICK)
