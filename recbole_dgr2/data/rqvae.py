"""RQ-VAE: an autoencoder whose latent vector is quantised level by level, so that codes and latents fit each other.

Encoder and decoder are small MLPs. Codebooks are not trained by gradient: each codeword is the exponential moving mean
of the residuals that chose it. Against codes that nobody uses there are a k-means start, a penalty on unequal soft
usage, and a reset of dead codewords.

Sources: residual quantisation of Lee et al. 2022 (arXiv 2203.01941) as used for semantic IDs by Rajput et al. 2023
(arXiv 2305.05065); moving means of van den Oord et al. 2017 (arXiv 1711.00937, appendix A.1); start, reset and
diversity term as GR2 (arXiv 2602.07774, section 2.3) lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from tqdm import tqdm

from recbole_dgr2.data.quantized import CodeOptions, Quantized, nearest_codes
from recbole_dgr2.data.residual_kmeans import cluster


@dataclass(frozen=True)
class RQVAEOptions:
    """How an RQ-VAE is built and trained.

    Args:
        latent, hidden: width of the latent vector and of the one hidden layer of encoder and decoder.
        epochs: passes over the vectors; the first tenth trains the autoencoder without quantisation.
        batch_size, learning_rate: of Adam.
        decay: of the moving means of the codebooks, in (0, 1).
        commitment: weight of the squared distance of a residual to its codeword.
        diversity: weight of `K * sum_k p_k^2`, p_k the mean soft usage of codeword k in a batch; 1 is the least.
        patience: batches without use after which a codeword is dead.
    """

    latent: int = 32
    hidden: int = 256
    epochs: int = 150
    batch_size: int = 1024
    learning_rate: float = 2e-3
    decay: float = 0.97
    commitment: float = 0.25
    diversity: float = 0.02
    patience: int = 24


class Codebook(nn.Module):
    """One level: codewords [K, d] that follow the vectors choosing them.

    Buffers only: `words` = `sums` / `counts`, moving means of the sum and number of vectors a batch, and `idle`, the
    batches since a codeword was chosen.
    """

    words: Tensor
    counts: Tensor
    sums: Tensor
    idle: Tensor

    def __init__(self, words: Tensor) -> None:
        super().__init__()
        self.register_buffer("words", words.clone())
        self.register_buffer("counts", torch.ones(len(words)))
        self.register_buffer("sums", words.clone())
        self.register_buffer("idle", torch.zeros(len(words), dtype=torch.int64))

    def distances(self, vectors: Tensor) -> Tensor:
        """Squared distances [B, K]; differentiable in `vectors`."""
        squares = vectors.square().sum(1, keepdim=True) + self.words.square().sum(1)
        return (squares - 2 * vectors @ self.words.T).clamp(min=0)

    @torch.no_grad()
    def follow(self, vectors: Tensor, codes: Tensor, decay: float) -> None:
        """Moves the chosen codewords towards the vectors [B, d] that chose them."""
        chosen = one_hot(codes, len(self.words)).to(vectors.dtype)
        counts = chosen.sum(0)
        self.counts.mul_(decay).add_(counts, alpha=1 - decay)
        self.sums.mul_(decay).add_(chosen.T @ vectors, alpha=1 - decay)
        # a new tensor: the old one is still part of the batch's graph
        self.words = torch.where(counts[:, None] > 0, self.sums / self.counts[:, None], self.words)
        self.idle.add_(1).masked_fill_(counts > 0, 0)

    @torch.no_grad()
    def revive(self, vectors: Tensor, distances: Tensor, patience: int) -> int:
        """Puts codewords that were idle for `patience` batches onto the vectors [B, d] farthest from their codeword.

        distances: of every vector to its own codeword, [B]. Returns how many were put.
        """
        dead = (self.idle >= patience).nonzero()[: len(vectors), 0]
        hardest = distances.topk(len(dead)).indices
        self.words[dead] = self.sums[dead] = vectors[hardest]
        self.counts[dead], self.idle[dead] = 1.0, 0
        return len(dead)


class RQVAE(nn.Module):
    """Encoder, codebooks and decoder for vectors of `width` dimensions; see `RQVAEOptions`."""

    def __init__(self, width: int, options: RQVAEOptions) -> None:
        super().__init__()
        self.options = options
        self.encoder = _mlp(width, options.hidden, options.latent)
        self.decoder = _mlp(options.latent, options.hidden, width)
        self.codebooks = nn.ModuleList()

    def start_codebooks(self, vectors: Tensor, code_options: CodeOptions) -> None:
        """k-means over the latents, then over what each level leaves."""
        left = self.encode(vectors)
        for level in range(code_options.levels):
            words = cluster(left, code_options.codes, code_options.seed + level, iterations=20)
            left = left - words[nearest_codes(left, words)]
            self.codebooks.append(Codebook(torch.from_numpy(words)))

    @torch.no_grad()
    def encode(self, vectors: Tensor) -> np.ndarray:
        """Latents, float32 [I, latent]."""
        return self.encoder(vectors).numpy()

    def loss(self, vectors: Tensor) -> Tensor:
        """Squared error of reconstruction, commitment and diversity of one batch [B, width], as a mean over vectors.

        In training mode the codebooks move. Without codebooks: the error of the plain autoencoder.
        """
        latent = self.encoder(vectors)
        whole, extra = torch.zeros_like(latent), latent.new_zeros(())
        for codebook in self.codebooks:
            word, own = self._level(codebook, latent - whole)
            whole, extra = whole + word, extra + own
        passed = latent + (whole - latent).detach() if self.codebooks else latent
        return (self.decoder(passed) - vectors).square().sum(1).mean() + extra

    def _level(self, codebook: nn.Module, left: Tensor) -> tuple[Tensor, Tensor]:
        """The codewords of what is left [B, latent], and the level's share of the loss."""
        assert isinstance(codebook, Codebook)
        distances = codebook.distances(left)
        nearest, codes = distances.min(1)
        # soft usage at a temperature that follows the scale of the distances
        usage = (-distances / nearest.detach().mean().clamp(min=1e-6)).softmax(1).mean(0)
        spread = len(usage) * usage.square().sum()
        words = codebook.words[codes]
        if self.training:
            codebook.follow(left.detach(), codes, self.options.decay)
            codebook.revive(left.detach(), nearest.detach(), self.options.patience)
        return words, self.options.commitment * nearest.mean() + self.options.diversity * spread


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


def rqvae(vectors: np.ndarray, code_options: CodeOptions, options: RQVAEOptions | None = None) -> Quantized:
    """Train an RQ-VAE and quantise its latents; the vectors of the result are the latents.

    The same vectors, options and number of torch threads give the same codes. torch's global random state is left as it
    was.

    Args:
        vectors: float32 [I, d], I >= 1.
        code_options: levels, codewords, seed.
        options: model and training.

    Raises:
        ValueError: no vectors.
        FloatingPointError: the loss is not finite.
    """
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(f"RQ-VAE: expected vectors [I, d], got {list(vectors.shape)}")
    # unit variance: the weights of the loss then mean the same for any embedding
    spread = float(np.square(vectors - vectors.mean(axis=0)).sum(axis=1).mean()) ** 0.5
    inputs = torch.from_numpy(((vectors - vectors.mean(axis=0)) / (spread or 1.0)).astype(np.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(code_options.seed)
        model = RQVAE(vectors.shape[1], options or RQVAEOptions())
        _train(model, inputs, code_options)
    latents = model.eval().encode(inputs)
    codebooks = tuple(_words(codebook) for codebook in model.codebooks)
    left, codes = latents.copy(), []
    for codebook in codebooks:
        codes.append(nearest_codes(left, codebook))
        left -= codebook[codes[-1]]
    return Quantized(latents, codebooks, np.stack(codes, axis=1))


def _words(codebook: nn.Module) -> np.ndarray:
    assert isinstance(codebook, Codebook)
    return codebook.words.numpy().copy()


def _train(model: RQVAE, inputs: Tensor, code_options: CodeOptions) -> None:
    options = model.options
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, options.epochs))
    plain = options.epochs // 10
    hidden = None if code_options.progress else True  # None: shown on a terminal only
    for epoch in tqdm(range(options.epochs), desc="RQ-VAE", disable=hidden, leave=False):
        if epoch == plain:
            model.start_codebooks(inputs, code_options)
        for batch in torch.randperm(len(inputs)).split(options.batch_size):
            loss = model.loss(inputs[batch])
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"RQ-VAE: the loss is {float(loss.detach())} in epoch {epoch}; check the embeddings"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    if not model.codebooks:
        model.start_codebooks(inputs, code_options)
