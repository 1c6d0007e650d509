"""Weights sharded over processes (FSDP2): the numbers of one process, a part of the memory, the same plain folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recbole_dgr2.system import processes
from recbole_dgr2.system.paths import properties_dir
from tests.launched import finished
from tests.sharded_program import STAGES, best_early
from tests.test_processes import close
from tests.tiny import tiny_backbone
from tests.training import same

LAUNCH = ["-m", "accelerate.commands.launch", "--config_file"]
ACCURACY = ("accuracy", "valid_rate", "agreement", "finished", "length", "tokens_per_pass")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FSDP_VERSION", "1", "fsdp_version is 1, expected 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params is true, expected false"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "fsdp_cpu_ram_efficient_loading is true, expected false"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "distributed_type DEEPSPEED: it needs CUDA.*expected FSDP"),
    ],
)
def test_what_is_not_done_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message) as caught:
        processes.start()
    assert "\n" not in str(caught.value) and "gpus_8_fsdp.yaml" in str(caught.value)


def test_one_process_has_nobody_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not processes.sharded()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two processes found, and where."""
    folder = tmp_path_factory.mktemp("sharded")
    ready = str(properties_dir() / "accelerate" / "cpus_2_fsdp.yaml")
    out = finished([*LAUNCH, ready, "-m", "tests.sharded_program", str(folder)], 1, folder)[0]
    return folder, json.loads(next(line for line in out.splitlines() if line.startswith("[{")))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_sharded_training_is_that_of_one_process(
    name: str, both: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """After a kill and a resume; rollouts, accuracies and rates to the last digit."""
    folder, (one, other) = both
    assert one[name] == other[name] and one[name]["killed"]
    alone = STAGES[name](tmp_path / name, 0)
    close(one[name], alone)
    for left, right in zip(one[name]["history"], alone["history"], strict=True):
        for key, value in right.items():
            assert left[key] == value or not key.endswith(ACCURACY), key
    names = [sorted(path.name for path in (place / name).iterdir()) for place in (folder, tmp_path)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_sharded_run_is_resumed_by_one_process(
    both: tuple[Path, list[dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state is the same whole files, whatever the launch."""
    folder, found = both
    assert all(each["crossing"] for each in found)
    with caplog.at_level("INFO"):
        resumed = STAGES["supervised"](folder / "crossing", 0)
    assert "resumed at epoch" in caplog.text
    close(resumed, STAGES["supervised"](tmp_path / "supervised", 0))


@pytest.mark.slow
def test_each_process_holds_its_part_and_the_best_weights_are_kept(
    both: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """In training the stage's own model holds a number a weight, and that is not a number."""
    found = [each["early"] for each in both[1]]
    alone = best_early(tmp_path / "early")
    close(found[0], alone)
    losses = [record["valid_loss"] for record in alone["history"]]
    assert min(losses) < losses[-1]
    for kind in ("weights", "gradients", "states"):
        shares = [each["held"][kind] for each in found]
        assert sum(shares) == pytest.approx(1) and max(shares) < 0.51
    weights = len(list(tiny_backbone().model.parameters()))
    assert all(each["held"]["empty"] and each["held"]["stored"] == 4 * weights for each in found)


@pytest.mark.slow
def test_muon_names_adamw(both: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all("optimizer muon: needs whole matrices" in each["muon"] for each in both[1])
    assert all(each["muon"].endswith("expected adamw") for each in both[1])


@pytest.mark.slow
def test_the_folder_is_plain(both: tuple[Path, list[dict[str, Any]]]) -> None:
    """Every weight at its full size, in one safetensors file, as transformers writes it."""
    folder, _ = both
    model = tiny_backbone().model
    saved = load_file(folder / "supervised" / "model.safetensors")
    expected = {name: tensor.shape for name, tensor in model.state_dict().items() if name in saved}
    assert {name: tensor.shape for name, tensor in saved.items()} == expected
    assert not same(saved, {name: model.state_dict()[name] for name in saved})
