"""LoRA adapters (peft): one backbone in memory, which is the teacher with its adapter off and the student with it on.

New tokens (labels, semantic IDs, the mask token) are rows of embedding and head that are trained beside the low-rank
matrices; every other weight of the base stays as it is. V embedding rows, n trained rows, H hidden size.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recbole_dgr2.model.backbone import Backbone

ADAPTER_FILE = "adapter_model.safetensors"
SETTINGS_FILE = "adapter_config.json"


@dataclass(frozen=True)
class AdapterOptions:
    """Size of the adapters: update = alpha / rank * B A, with A [rank, in] and B [out, rank] of a linear layer.

    targets: last names of the adapted layers, such as "q_proj"; empty: all linear layers of attention and MLP.

    Raises ValueError for a rank below 1 or an alpha not above 0.

    Source: LoRA (arXiv 2106.09685).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora_rank={self.rank}: expected an integer >= 1")
        if not self.alpha > 0:
            raise ValueError(f"lora_alpha={self.alpha}: expected a number > 0")


@dataclass(frozen=True)
class Base:
    """What adapters lie over, by reference.

    source: absolute folder, or name on the hub. digest: of its safetensors files. dtype: in which it is loaded. rows:
    to which its embedding is to grow.
    """

    source: str
    digest: str
    dtype: str
    rows: int

    @classmethod
    def of(cls, source: str | Path, backbone: Backbone) -> Base:
        """The reference to `source`, from which `backbone` was loaded, and may have grown since."""
        path = Path(source).expanduser()
        name = str(path.resolve()) if path.is_dir() else str(source)
        return cls(
            name, weights_digest(name), str(backbone.model.dtype).removeprefix("torch."), backbone.rows
        )


@dataclass(frozen=True)
class Adapted(Backbone):
    """A backbone with an adapter, which alone is trained."""

    base: Base

    @property
    def options(self) -> AdapterOptions:
        """Size of its adapter."""
        config = _config(self.model)
        return AdapterOptions(config.r, config.lora_alpha, tuple(sorted(config.target_modules or ())))

    def parameters(self) -> dict[str, Tensor]:
        """Weights of the adapter by the names that peft saves them under."""
        return dict(get_peft_model_state_dict(self.model, save_embedding_layers=False))


class TokenRows(TrainableTokensLayer):
    """peft's trained rows without a copy of the whole matrix at every pass: the other rows never leave the base."""

    def forward_adapters(self, x: Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings of ids x, or logits of hidden states x [..., H], with the trained rows in their places."""
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        (name,) = active_adapters
        ids = torch.tensor(self.token_indices[name], device=x.device)
        rows = self.trainable_tokens_delta[name].to(result.dtype)
        if isinstance(self.base_layer, nn.Embedding):
            scale = self._get_embed_scale()
            rows = rows if scale is None else rows * scale.to(rows.dtype)
            place = torch.searchsorted(ids, x).clamp(max=len(ids) - 1)
            return torch.where((ids[place] == x)[..., None], rows[place], result)
        scores = nn.functional.linear(x, rows.to(x.dtype))
        if self.base_layer.bias is not None:
            scores = scores + self.base_layer.bias[ids]
        return result.index_copy(-1, ids, scores)


class RowsWrapper(TrainableTokensWrapper):
    """peft's wrapper, with the attributes of the base's layer, so that callers can ask for its shape and type."""

    def _hasattr_wrapped(self, name: str, modules: Any) -> bool:
        return hasattr(modules["token_adapter"].base_layer, name)

    def _getattr_wrapped(self, name: str, modules: Any) -> Any:
        return getattr(modules["token_adapter"].base_layer, name)


LIGHTER: dict[type, type] = {TrainableTokensLayer: TokenRows, TrainableTokensWrapper: RowsWrapper}


def adapt(
    backbone: Backbone, options: AdapterOptions, base: Base, token_ids: Sequence[int], seed: int
) -> Adapted:
    """Put a fresh adapter, which changes nothing yet, over a backbone; its own weights are frozen.

    Args:
        backbone: the base, changed in place: its layers are wrapped.
        options: size of the adapter.
        base: where the same weights can be read again.
        token_ids: rows of embedding and head that are trained as well; what the embedding grew by is among them.
        seed: of the low-rank matrices; the global random state is left as it was.

    Raises:
        ValueError: a target that is no linear layer of the model; names the nearest.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=_targets(backbone.model, options.targets),
        trainable_token_indices=_rows_of(backbone.model, sorted(set(token_ids))),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Adapted(_wrap(backbone.model, config), backbone.tokenizer, base)


def merge(backbone: Backbone) -> Backbone:
    """The plain backbone with the adapter's update in its weights, in place; a plain one as it is."""
    if not isinstance(backbone, Adapted):
        return backbone
    model: Any = backbone.model
    plain = model.merge_and_unload().requires_grad_(True)
    if hasattr(plain, "peft_config"):
        del plain.peft_config  # or transformers would save it as an adapter
    plain._hf_peft_config_loaded = False
    return Backbone(plain.eval(), backbone.tokenizer)


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The base inside: no low-rank update, no trained row. What is trained is the same afterwards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def write_adapter(folder: Path, backbone: Adapted, source: str) -> None:
    """Write peft's two files into an existing folder; `source`: the base as it is named there."""
    config = _config(backbone.model)
    named = LoraConfig(**{**config.to_dict(), "base_model_name_or_path": source, "inference_mode": True})
    named.save_pretrained(str(folder))
    weights = {name: value.detach().cpu().contiguous() for name, value in backbone.parameters().items()}
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})


def read_adapter(folder: Path, backbone: Backbone, base: Base) -> Adapted:
    """Put the adapter of a folder over its base; ValueError where a file is damaged or does not fit it."""
    try:
        config = LoraConfig.from_pretrained(str(folder))
        config.inference_mode, config.base_model_name_or_path = False, None
        adapted = Adapted(_wrap(backbone.model, config), backbone.tokenizer, base)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{folder / SETTINGS_FILE} cannot be read: {' '.join(str(error).split())}"
        ) from error
    fill_adapter(folder, adapted)
    return adapted


def fill_adapter(folder: Path, backbone: Adapted) -> None:
    """Give an adapter the weights in a folder; ValueError where they are damaged or of another size."""
    path = folder / ADAPTER_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); run the stage again") from error
    own = {name: tuple(value.shape) for name, value in backbone.parameters().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if wrong := [name for name in {**own, **found} if own.get(name) != found.get(name)]:
        sizes = (found.get(wrong[0]), own.get(wrong[0]))
        raise ValueError(
            f"{path}: {len(wrong)} tensors do not fit, such as {wrong[0]}: {sizes[0]}, expected {sizes[1]}"
        )
    set_peft_model_state_dict(backbone.model, weights)


def weights_digest(source: str | Path) -> str:
    """Short SHA-256 of all safetensors files of a folder or of a model in the hub's cache, names included."""
    path = Path(source)
    if not path.is_dir():
        path = Path(snapshot_download(str(source), allow_patterns=["*.safetensors"], local_files_only=True))
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def _config(model: Any) -> LoraConfig:
    return model.peft_config[model.active_adapter]


def _wrap(model: Any, config: LoraConfig) -> PeftModel:
    wrapped = get_peft_model(model, config)
    for layer in wrapped.modules():
        if type(layer) in LIGHTER:
            layer.__class__ = LIGHTER[type(layer)]
    return wrapped.eval()


def _targets(model: Any, names: Sequence[str]) -> list[str]:
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    for name in names:
        if name not in linear:
            near = difflib.get_close_matches(name, linear, n=1, cutoff=0.4)
            hint = f"nearest: {near[0]}" if near else f"expected some of {', '.join(sorted(linear))}"
            raise ValueError(f"lora_targets: {name!r} is no linear layer of the backbone; {hint}")
    return list(names) or sorted(linear)


def _rows_of(model: Any, ids: list[int]) -> dict[str, list[int]] | None:
    """Trained rows by module; a head that is tied to the embedding follows it."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [embedding] if head.weight is embedding.weight else [embedding, head]
    return {names[id(module)]: ids for module in modules} if ids else None
