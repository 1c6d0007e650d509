"""Config: precedence, strictness, no evaluation of text, views, and the retriever's own config."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recbole.config import Config as RecBoleConfig
from recbole.utils import InputType

from recbole_dgr2.atomic_files import check_atomic_files
from recbole_dgr2.config import Config, retriever_class, retriever_config, retriever_names
from recbole_dgr2.pipeline import stage_views, views
from recbole_dgr2.schema import nearest, options_of, parse_text, read_options, read_yaml
from recbole_dgr2.system.paths import properties_dir
from tests.make_toy import item_token, write_toy

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("prompt", "accelerate", "scale")  # not options with their meaning
YAMLS = sorted(path for path in properties_dir().rglob("*.yaml") if path.parent.name not in OTHERS)
LEAVE_ONE_OUT = {"split": {"LS": "valid_and_test"}, "order": "TO", "group_by": "user"}
Build = Callable[..., Config]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_every_shipped_option_is_described_and_valid(path: Path) -> None:
    options = read_options(path)
    assert [option.key for option in options] == list(read_yaml(path))
    for option in options:
        assert option.problem(option.default) is None, f"{path.name}: {option.key}"
        assert len(option.meaning) > 3


def test_toy_data_is_reproducible(tmp_path: Path) -> None:
    write_toy(tmp_path)
    for name in ("toy.inter", "toy.item"):
        assert (tmp_path / name).read_bytes() == (ROOT / "dataset" / "toy" / name).read_bytes()


def test_toy_data_follows_its_rule() -> None:
    histories: dict[str, list[str]] = {}
    for line in (ROOT / "dataset" / "toy" / "toy.inter").read_text().splitlines()[1:]:
        user, item, _ = line.split("\t")
        histories.setdefault(user, []).append(item)
    successor = {item_token(c, p): item_token(c, (p + 1) % 10) for c in range(8) for p in range(10)}
    assert len(histories) == 60
    for items in histories.values():
        assert len(items) >= 8
        assert len(set(items)) == len(items)
        assert [successor[item] for item in items[-4:-1]] == items[-3:]


def test_precedence(tmp_path: Path, toy_config: Build) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("tau: 0.5\nblock_size: 8\nn_candidates: 5\n")
    config = Config(
        dataset="toy",
        config_file_list=[file],
        config_dict={"data_path": str(ROOT / "dataset"), "block_size": 16, "n_candidates": 6},
        arguments=["--n_candidates=7"],
    )
    assert (config["tau"], config["block_size"], config["n_candidates"]) == (0.5, 16, 7)
    assert config["title_field"] == "title"
    assert config["model"] == "DGR2"
    assert config["load_col"] == {"inter": ["user_id", "item_id", "timestamp"]}


def test_command_line_of_the_process_is_not_read(toy_config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest", "--epochs=7", "--maxfail=1", "--tau=0.1"])
    config = toy_config()
    assert (config["epochs"], config["tau"]) == (1, 0.9)
    assert retriever_config(config)["epochs"] == 1
    assert sys.argv[1] == "--epochs=7"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_candiates": 5}, r"n_candiates \(config_dict\).*nearest known key is 'n_candidates'"),
        ({"embeding_size": 5, "retriever": "BPR"}, r"embeding_size.*BPR.*'embedding_size'"),
        ({"embedding_size": 5, "retriever": "Pop"}, r"embedding_size.*nor Pop"),
        ({"tau": 1.5}, r"tau \(config_dict\): expected float in \(0, 1\], got 1.5"),
        ({"tau": 0}, r"tau .*got 0"),
        ({"tau": float("nan")}, r"tau .*got nan"),
        ({"tau": True}, r"tau .*got bool True"),
        ({"n_candidates": 2.5}, r"n_candidates .*expected int in \[2, 100\], got float 2.5"),
        ({"n_candidates": "ten"}, r"n_candidates .*got str 'ten'"),
        ({"context": "casual"}, r"context .*one of causal, block.*did you mean 'causal'"),
        ({"stages": ["ar_techer"]}, r"stages .*did you mean 'ar_teacher'"),
        ({"threads": "automatic"}, r"threads .*int or auto"),
        ({"mask_history": "yes please"}, r"mask_history .*expected bool"),
        ({"retriever": "SASrec"}, r"retriever: .*did you mean SASRec"),
        ({"retriever": "qqqq"}, r"retriever: .*expected one of ADMMSLIM, "),
        ({"retriever": 5}, r"retriever: .*'5'"),
        ({"eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}}}, r"eval_args: .*leave-one-out"),
        ({"eval_args": {"order": "TO"}}, r"eval_args: .*leave-one-out"),
        ({"valid_metric": "NDCG@20"}, r"valid_metric: .*'20'.*topk"),
        ({"embedded_hidden_size": 30}, r"embedded_hidden_size: .*multiple"),
        ({"embedded_num_kv_heads": 3}, r"embedded_num_kv_heads: .*divisor"),
        ({"title_field": "titel"}, r"toy\.item: no column 'titel' .*nearest is 'title'"),
        ({"load_col": {"inter": ["user_id", "item_id", "time"]}}, r"toy\.inter: no column 'time'"),
        ({"train_neg_sample_args": 3}, r"train_neg_sample_args .*dict"),
    ],
)
def test_bad_values_are_one_line_errors(toy_config: Build, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        toy_config(**keys)
    assert "\n" not in str(caught.value)


def test_bad_words_and_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tua \(command line\).*'tau'"):
        Config(dataset="toy", arguments=["--tua=1"])
    with pytest.raises(ValueError, match="expected --key=value, got '-x'"):
        Config(dataset="toy", arguments=["-x"])
    with pytest.raises(ValueError, match="--tau is given twice"):
        Config(dataset="toy", arguments=["--tau=1", "--tau=0.5"])
    with pytest.raises(ValueError, match="dataset: none given"):
        Config()
    with pytest.raises(ValueError, match="--retriever=SASRec"):
        Config(model="SASRec", dataset="toy")
    with pytest.raises(ValueError, match="model: expected one of DGR2, got 'XYZ'"):
        Config(model="XYZ", dataset="toy")
    with pytest.raises(FileNotFoundError, match="no such config file"):
        Config(dataset="toy", config_file_list=[tmp_path / "none.yaml"])
    bad = tmp_path / "bad.yaml"
    bad.write_text("tau: 0.5\n b: [\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: not valid YAML in line"):
        Config(dataset="toy", config_file_list=[bad])
    bad.write_text("- 1\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: expected lines"):
        Config(dataset="toy", config_file_list=[bad])
    bad.write_text("tau: 2.0\n")
    with pytest.raises(ValueError, match=r"tau \(.*bad\.yaml\)"):
        Config(dataset="toy", config_file_list=[bad])


@pytest.mark.parametrize(
    ("name", "near"), [("ml-100", "ml-100k"), ("Amazon_Beautty", "amazon-beauty"), ("toyy", "toy")]
)
def test_absent_data_sets(tmp_path: Path, name: str, near: str) -> None:
    (tmp_path / "toy").mkdir()
    with pytest.raises(FileNotFoundError, match=f"no data set '{name}'.*'{near}'"):
        Config(dataset=name, config_dict={"data_path": str(tmp_path)})


def test_empty_and_absent_files(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    values: dict[str, Any] = {
        "dataset": "toy",
        "data_path": folder,
        "load_col": {"inter": ["user_id"]},
        "title_field": None,
        "category_field": None,
        "brand_field": None,
        "field_separator": "\t",
        "benchmark_filename": None,
    }
    with pytest.raises(FileNotFoundError, match=r"toy\.inter: no such file"):
        check_atomic_files(values)
    for text in ("", "\n", "user_id:token\titem_id:token\n"):
        (folder / "toy.inter").write_text(text)
        with pytest.raises(ValueError, match=r"toy\.inter: the file is empty"):
            check_atomic_files(values)
    (folder / "toy.inter").write_bytes(
        b"item_id:token\tuser_id:token\r\ni\tu\r\n"
    )  # recbole 1.2.0 ships CRLF
    check_atomic_files(values)


def test_text_is_never_evaluated(toy_config: Build, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')"
    config = toy_config(run_dir=code, wandb_project=code)
    assert config["run_dir"] == code
    assert retriever_config(config)["wandb_project"] == code
    assert not mark.exists()
    assert toy_config(run_dir="1+1")["run_dir"] == "1+1"
    assert toy_config(prompt="123")["prompt"] == "123"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3", 3),
        ("true", True),
        ("False", False),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("['a', b]", ["a", "b"]),
        ("{'LS': 'valid_and_test'}", {"LS": "valid_and_test"}),
        ("[5,inf)", "[5,inf)"),
        ("'3'", "3"),
        ("1+1", "1+1"),
        ("a: b", "a: b"),
        ("a # b", "a # b"),
        ("2020-01-01", "2020-01-01"),
        ("\t", "\t"),
        (" ", " "),
        ("", ""),
    ],
)
def test_texts_mean_what_they_mean_in_yaml(text: str, value: Any) -> None:
    assert parse_text(text, None) == value


@given(st.text())
def test_any_text_parses_and_text_options_keep_it(text: str) -> None:
    parse_text(text, None)
    kept = parse_text(text, options_of("DGR2", None)["backbone"])
    assert kept == text


@given(st.sampled_from(sorted(options_of("DGR2", None))))
def test_nearest_finds_a_key_with_one_letter_missing(key: str) -> None:
    keys = options_of("DGR2", None)
    assert nearest(key, keys) == key
    assert nearest(key[:-1], keys) is not None


def test_retriever_names_are_recbole_classes() -> None:
    names = retriever_names()
    for name in ("Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec", "BERT4Rec"):
        assert name in names
        assert retriever_class(name).__name__ == name
    assert "FM" not in names


@pytest.mark.parametrize("name", ["Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec", "BERT4Rec"])
def test_retriever_config(toy_config: Build, name: str) -> None:
    host = retriever_config(toy_config(retriever=name))
    assert type(host) is RecBoleConfig
    assert host["model"] == name
    assert host["eval_args"] == {**LEAVE_ONE_OUT, "mode": {"valid": "full", "test": "full"}}
    assert host["topk"] == [1, 3, 5, 10]
    assert host["valid_metric"] == "NDCG@10"
    assert host["load_col"] == {"inter": ["user_id", "item_id", "timestamp"]}
    sampled = host["train_neg_sample_args"]["distribution"]
    assert sampled == ("none" if name in ("GRU4Rec", "SASRec", "BERT4Rec") else "uniform")
    assert "n_candidates" not in host


def test_retriever_keys_pass_through(toy_config: Build) -> None:
    config = toy_config(retriever="SASRec", n_layers=1, loss_type="BPR", MAX_ITEM_LIST_LENGTH=7)
    host = retriever_config(config, epochs=3)
    assert (host["n_layers"], host["MAX_ITEM_LIST_LENGTH"], host["epochs"]) == (1, 7, 3)
    assert host["train_neg_sample_args"]["distribution"] == "uniform"
    assert host["MODEL_INPUT_TYPE"] == InputType.PAIRWISE
    assert config["epochs"] == 1
    assert Path(host["data_path"]) == ROOT / "dataset" / "toy"


def test_ml_100k_ships_with_recbole() -> None:
    config = Config(dataset="ml-100k")
    assert config["title_field"] == "movie_title"
    assert retriever_config(config)["load_col"] == config["load_col"]


def test_views(toy_config: Build, tmp_path: Path) -> None:
    config = toy_config(tau=0.8, conversion_t_min=0.1, ar_teacher_epochs=7, block_size=16)
    run = views.run_options(config)
    assert run.run_dir == tmp_path / "saved" / "toy-ItemKNN-2020"
    assert run.stages == ("ar_teacher", "conversion", "distillation", "reinforcement")
    assert views.run_options(toy_config(threads="auto", run_dir="x")).threads is None
    assert views.candidate_options(config).n == 10
    assert views.prompt_options(config).title_field == "title"
    assert views.report_options(config).topk == (1, 3, 5, 10)
    assert views.embedded_spec(config).hidden_size == 32
    assert views.block_diffusion_spec(config, mask_id=9).block_size == 16
    assert views.noise_options(config).t_min == 0.1
    assert views.decode_options(config).tau == 0.8
    assert views.decode_options(config, "autoregressive", batch_size=1).batch_size == 1
    teacher = views.stage_options(config, "ar_teacher")
    assert (teacher.epochs, teacher.seed) == (7, 2020)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 1  # type: ignore[misc]


def test_every_stage_key_is_a_field_of_its_views(toy_config: Build) -> None:
    config = toy_config()
    for stage in ("ar_teacher", "conversion"):
        fields = {field.name for field in dataclasses.fields(views.stage_options(config, stage))}
        fields |= {field.name for field in dataclasses.fields(views.noise_options(config))} | {"ar_weight"}
        for option in read_options(properties_dir() / "quick_start_config" / f"{stage}.yaml"):
            assert option.key.removeprefix(f"{stage}_") in fields


@pytest.mark.parametrize("stage", ["ar_teacher_rl", "reinforcement"])
def test_every_key_of_reinforcement_learning_reaches_its_view(toy_config: Build, stage: str) -> None:
    changed = {
        "iterations": 9,
        "groups": 3,
        "group_size": 5,
        "max_draws": 4,
        "temperature": 0.5,
        "clip_low": 0.1,
    }
    config = toy_config(tau=0.7, **{f"{stage}_{name}": value for name, value in changed.items()})
    options, policy = (
        stage_views.policy_stage_options(config, stage),
        stage_views.policy_options(config, stage),
    )
    decoding = stage_views.rollout_options(config, stage)
    assert (options.epochs, options.lr_schedule, options.seed) == (9, "constant", 2020)
    assert (policy.sampling.groups, policy.sampling.samples, policy.sampling.max_draws) == (3, 5, 4)
    assert policy.clip_low == 0.1 and policy.clip_high == {"ar_teacher_rl": 0.28, "reinforcement": 0.2}[stage]
    assert policy.ar_weight == {"ar_teacher_rl": 0.0, "reinforcement": 1.0}[stage]
    assert (decoding.temperature, decoding.tau, decoding.max_new_tokens) == (0.5, 0.7, 128)
    assert decoding.mode == {"ar_teacher_rl": "autoregressive", "reinforcement": "block"}[stage]
    fields = {field.name for view in (options, policy, decoding) for field in dataclasses.fields(view)}
    fields |= {"iterations", "groups", "group_size", "max_draws", "conditional_bonus"}
    for option in read_options(properties_dir() / "quick_start_config" / f"{stage}.yaml"):
        assert option.key.removeprefix(f"{stage}_") in fields


@pytest.mark.parametrize("key", ["reinforcement_top_p", "reinforcement_top_k", "ar_teacher_rl_top_p"])
def test_sampling_from_a_part_of_the_distribution_is_refused(toy_config: Build, key: str) -> None:
    """Replay scores a token under the whole distribution."""
    with pytest.raises(ValueError, match=f"{key} .*knows this key"):
        toy_config(**{key: 0.9})
