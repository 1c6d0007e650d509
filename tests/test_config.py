"""Config: precedence, one-line errors for bad keys, values and files, and texts that are never evaluated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbole_dgr2.atomic_files import check_atomic_files
from recbole_dgr2.config import Config, retriever_config
from recbole_dgr2.schema import nearest, options_of, parse_text
from tests.toy_run import ROOT, Build


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
        (
            {"stages": "ar_teacher,conversion"},
            r"stages .*expected a list, such as \[ar_teacher\], each one of",
        ),
        ({"metrics": ["Recal"]}, r"metrics .*expected ranking metrics .*got 'Recal'; did you mean 'Recall'"),
        ({"metrics": ["AUC"]}, r"metrics .*got 'AUC'"),
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
        ({"metrics": []}, r"metrics .*at least one"),
        ({"cache_dir": ""}, r"cache_dir .*got an empty text"),
        ({"backbone": ""}, r"backbone .*got an empty text"),
        ({"seed": 2**32}, r"seed .*in \[0, 4294967295\]"),
        ({"stages": ["conversion", "ar_teacher"]}, r"stages: .*\['ar_teacher', 'conversion'\]"),
        ({"stages": ["ar_teacher", "ar_teacher"]}, r"stages: expected each once"),
        ({"lora_targets": []}, r"lora_targets: an empty list"),
    ],
)
def test_bad_values_are_one_line_errors(toy_config: Build, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        toy_config(**keys)
    assert "\n" not in str(caught.value)


def test_bad_words_and_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"tau: 0.8  # \xff\n")
    with pytest.raises(ValueError, match=r"latin\.yaml: not UTF-8 text"):
        Config(dataset="toy", config_file_list=[tmp_path / "latin.yaml"])
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
