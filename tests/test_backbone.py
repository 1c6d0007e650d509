"""The embedded model, its tokenizer, loading any causal LM, the mask row, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

from recbole_dgr2.model.backbone import (
    Backbone,
    EmbeddedSpec,
    add_text_tokens,
    build_embedded,
    check_mask_id,
    load_backbone,
    reserve_mask_id,
    start_mask_row,
    train_tokenizer,
)
from tests.tiny import ARCHITECTURES, CORPUS, LABELS, tiny_backbone, tiny_tokenizer

models = pytest.mark.parametrize("architecture", ARCHITECTURES)
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _folder(path: Path, config: PreTrainedConfig, added: tuple[str, ...] = ()) -> Path:
    """A Hugging Face folder of a random model of this config and a tokenizer of 310 ids."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    train_tokenizer(CORPUS, 310, added).save_pretrained(path)
    return path


class TestTokenizer:
    @given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
    @settings(max_examples=200)
    def test_any_text_round_trips(self, text: str) -> None:
        tokenizer = tiny_tokenizer()
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    def test_answers_are_labels_and_single_separators(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = tokenizer.encode('["<c3>","<c7>"]', add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == ['["', "<c3>", '","', "<c7>", '"]']
        assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == '["<c3>","<c7>"]'

    def test_ids(self) -> None:
        tokenizer = tiny_tokenizer()
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.convert_tokens_to_ids(list(LABELS)) == list(range(310, 320))
        assert len(tokenizer) == 320

    def test_no_token_is_added_in_front_or_behind(self) -> None:
        assert tiny_tokenizer()("user").input_ids == tiny_tokenizer().encode("user", add_special_tokens=False)

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="vocab_size must be >= 268"):
            train_tokenizer(CORPUS, 200, LABELS)
        with pytest.raises(ValueError, match=r"'<\|eos\|>'"):
            add_text_tokens(train_tokenizer(CORPUS, 300, ()), ["<|eos|>"])

    def test_empty_corpus_still_encodes_everything(self) -> None:
        tokenizer = train_tokenizer([], 300, LABELS)
        assert tokenizer.decode(tokenizer.encode("é漢 <c1>")) == "é漢 <c1>"


class TestEmbedded:
    @models
    def test_shape(self, architecture: str) -> None:
        backbone = tiny_backbone(architecture)
        assert backbone.model.config.model_type == architecture
        assert backbone.rows % 64 == 0 and backbone.rows > len(backbone.tokenizer)
        tied = backbone.model.get_output_embeddings().weight is backbone.model.get_input_embeddings().weight
        assert tied and backbone.model.config._attn_implementation == "sdpa"
        assert not backbone.model.training and backbone.device == torch.device("cpu")
        assert (backbone.pad_id, backbone.eos_id) == (0, 1)

    def test_seed_alone_decides_the_weights(self) -> None:
        torch.manual_seed(5)
        state = torch.get_rng_state()
        one, two, other = tiny_backbone(seed=1), tiny_backbone(seed=1), tiny_backbone(seed=2)
        assert torch.equal(state, torch.get_rng_state()), "the global random state is left alone"
        weights = [b.model.get_input_embeddings().weight for b in (one, two, other)]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

    def test_default_size(self) -> None:
        backbone = build_embedded(EmbeddedSpec(), tiny_tokenizer(), seed=0)
        assert 300_000 < sum(p.numel() for p in backbone.model.parameters()) < 800_000

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"architecture": "gpt2"}, "architecture.*qwen3.*llama"),
            ({"hidden_size": 30}, "hidden_size 30.*num_heads 4"),
            ({"num_kv_heads": 3}, "num_heads 4.*num_kv_heads 3"),
            ({"num_layers": 0}, "num_layers"),
        ],
    )
    def test_bad_spec(self, values: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            EmbeddedSpec(**values)


class TestMaskId:
    @models
    def test_spare_row_is_used_without_resizing(self, architecture: str) -> None:
        backbone = tiny_backbone(architecture)
        rows = backbone.rows
        weight = backbone.model.get_input_embeddings().weight
        before = weight.detach().clone()
        mask_id = reserve_mask_id(backbone)
        assert mask_id == len(backbone.tokenizer) == 320 and backbone.rows == rows
        assert torch.equal(weight, before)
        start_mask_row(backbone, mask_id)
        assert torch.allclose(weight[mask_id], weight[:mask_id].mean(dim=0), atol=1e-6)
        assert torch.equal(weight[:mask_id], before[:mask_id])
        check_mask_id(backbone, mask_id)
        assert reserve_mask_id(backbone) == mask_id

    def test_full_embedding_is_resized_and_nothing_else_changes(self, tmp_path: Path) -> None:
        backbone = load_backbone(_folder(tmp_path / "m", Qwen3Config(**SMALL | {"vocab_size": 310})), ())
        ids = torch.arange(20)[None]
        with torch.no_grad():
            before = backbone.model(ids).logits
            assert reserve_mask_id(backbone) == 310
            after = backbone.model(ids).logits
        assert backbone.rows == 320 == backbone.model.config.vocab_size
        assert torch.equal(before, after[..., :310])

    def test_refused(self) -> None:
        backbone = tiny_backbone()
        with pytest.raises(ValueError, match="384 embedding rows"):
            check_mask_id(backbone, 384)
        with pytest.raises(ValueError, match="'<c1>'"):
            check_mask_id(backbone, 310)

    def test_a_token_added_later_is_noticed(self) -> None:
        backbone = Backbone(tiny_backbone().model, train_tokenizer(CORPUS, 320, LABELS))
        mask_id = reserve_mask_id(backbone)
        add_text_tokens(backbone.tokenizer, ["<s1>"])
        with pytest.raises(ValueError, match="'<s1>'"):
            check_mask_id(backbone, mask_id)


class TestLoad:
    @models
    def test_any_folder_gets_the_labels(self, architecture: str, tmp_path: Path) -> None:
        source = tiny_backbone(architecture)
        source.model.save_pretrained(tmp_path / "m")
        train_tokenizer(CORPUS, 300, ()).save_pretrained(tmp_path / "m")
        backbone = load_backbone(tmp_path / "m", LABELS)
        assert backbone.tokenizer.convert_tokens_to_ids(list(LABELS)) == list(range(300, 310))
        old, new = (b.model.get_input_embeddings().weight for b in (source, backbone))
        assert torch.equal(old[:300], new[:300]) and backbone.rows == 384
        rows = new[300:310]
        assert ((rows - new[:300].mean(dim=0)).abs() < 0.5 * new[:300].std(dim=0)).all(), "near the mean"
        assert len({tuple(row.tolist()) for row in rows}) == 10, "labels do not start out as one"
        again = load_backbone(tmp_path / "m", LABELS)
        assert torch.equal(new, again.model.get_input_embeddings().weight)

    def test_labels_beyond_the_rows_resize(self, tmp_path: Path) -> None:
        folder = _folder(
            tmp_path / "m", Qwen3Config(**SMALL | {"vocab_size": 310, "tie_word_embeddings": False})
        )
        backbone = load_backbone(folder, LABELS)
        assert backbone.rows == 320
        for weight in (m.weight for m in (backbone.model.lm_head, backbone.model.get_input_embeddings())):
            assert torch.isfinite(weight).all() and weight[310:].abs().sum() > 0

    def test_dtype(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path / "m", Qwen3Config(**SMALL))
        assert load_backbone(folder, (), "bfloat16").model.dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"dtype.*float32"):
            load_backbone(folder, (), "int8")

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (MistralConfig(**SMALL, sliding_window=16), "sliding window of 16"),
            (
                Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
                "window of 16",
            ),
            (BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}), "more layers"),
            (
                MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, eos_token_id=1),
                "linear_attention",
            ),
        ],
        ids=["mistral", "qwen3-window", "bert", "mamba"],
    )
    def test_refused_architectures(self, config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=reason) as error:
            load_backbone(_folder(tmp_path / "m", config), ())
        assert str(tmp_path / "m") in str(error.value) and "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "config",
        [
            MistralConfig(**SMALL, sliding_window=None),
            MistralConfig(**SMALL, sliding_window=128),
            Qwen3Config(**SMALL, use_sliding_window=False, sliding_window=16),
        ],
        ids=["none", "as long as the context", "switched off"],
    )
    def test_a_window_that_hides_nothing_is_accepted(self, config: PreTrainedConfig, tmp_path: Path) -> None:
        load_backbone(_folder(tmp_path / "m", config), ())

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
            ({"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}, "trust_remote_code"),
            (T5Config().to_dict() | {"num_layers": 1}, "encoder-decoder"),
            ({"model_type": "no-such-model"}, "no-such-model"),
            ({"is_causal": False}, "not causal"),
        ],
        ids=["quantised", "remote code", "encoder-decoder", "unknown", "bidirectional"],
    )
    def test_refused_configs(self, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
        folder = _folder(tmp_path / "m", Qwen3Config(**SMALL))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        (folder / "code.py").write_text("raise SystemExit('code of a checkpoint was run')")
        with pytest.raises(ValueError, match=reason) as error:
            load_backbone(folder, ())
        assert "\n" not in str(error.value)

    def test_logits_scaled_after_the_head(self, tmp_path: Path) -> None:
        granite = pytest.importorskip("transformers.models.granite.configuration_granite")
        with pytest.raises(ValueError, match="not just the head"):
            load_backbone(_folder(tmp_path / "m", granite.GraniteConfig(**SMALL, logits_scaling=4.0)), ())

    def test_missing_folder_lists_the_nearest(self, tmp_path: Path) -> None:
        (tmp_path / "qwen3-small").mkdir()
        (tmp_path / "other").mkdir()
        with pytest.raises(ValueError, match=r"nearest: .*qwen3-small") as error:
            load_backbone(tmp_path / "qwen3-smal", ())
        assert "other" not in str(error.value)
        with pytest.raises(ValueError, match="nearest: none"):
            load_backbone("./no/where", ())

    def test_damaged_or_incomplete_weights(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path / "m", Qwen3Config(**SMALL))
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="cannot be loaded"):
            load_backbone(folder, ())
        weights.unlink()
        torch.save({}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="safetensors"):
            load_backbone(folder, ())

    def test_missing_tensors_are_not_filled_at_random(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path / "m", Qwen3Config(**SMALL))
        path = folder / "config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3, "layer_types": None})
        )
        with pytest.raises(ValueError, match=r"lack .* tensors such as 'model.layers.2"):
            load_backbone(folder, ())

    def test_no_eos(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path / "m", Qwen3Config(**SMALL))
        path = folder / "tokenizer_config.json"
        values = json.loads(path.read_text())
        values.pop("eos_token")
        path.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="no EOS"):
            load_backbone(folder, ())
