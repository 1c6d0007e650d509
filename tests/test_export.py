"""Export: a folder that plain transformers loads and answers from as the run does; nothing foreign is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recbole_dgr2.decode import DecodeOptions, Request, decode
from recbole_dgr2.export import export, main
from recbole_dgr2.model.adapters import Adapted
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, load_stage, save_stage
from tests.test_adapters import converted, logits, stir
from tests.test_trace_runs import transformers_serve
from tests.tiny import random_tokens

PROMPTS = [tuple(row) for row in random_tokens([7, 12, 9], high=310)]
# a process in which this package cannot be imported; one token after the prompt at a time, as `generate` does
ELSEWHERE = """
import json, sys
sys.modules["recbole_dgr2"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
torch.set_num_threads(1)
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
texts = []
for prompt in prompts:
    found = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24)
    texts.append(tokenizer.decode(found[0, len(prompt):]))
config = model.generation_config
print(json.dumps({"texts": texts, "eos": config.eos_token_id, "class": type(model).__name__}))
"""


def run_folder(folder: Path) -> tuple[Adapted, BlockDiffusionSpec]:
    """A run whose conversion is an adapter that was trained, as far as weights can tell."""
    backbone, spec = converted(folder / "ar_teacher")
    stir(backbone)
    save_stage(folder / "conversion", backbone, StageInfo("conversion", "ar_teacher", spec))
    (folder / "run.json").write_text("{}")
    return backbone, spec


def test_plain_transformers_gives_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    backbone, spec = run_folder(tmp_path / "run")
    words = [f"--run_dir={tmp_path / 'run'}", "--stage=conversion", f"--output={tmp_path / 'out'}"]
    assert main(words) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert not [name for name in names if "adapter" in name]
    requests = [Request(i, prompt) for i, prompt in enumerate(PROMPTS)]
    options = DecodeOptions("autoregressive", 24, 3)
    found = decode(backbone.model, requests, options, eos_id=backbone.eos_id, spec=spec).completions
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "out"), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    elsewhere = json.loads(done.stdout)
    assert elsewhere["texts"] == [backbone.tokenizer.decode(each.token_ids) for each in found]
    assert elsewhere["eos"] == backbone.eos_id and elsewhere["class"] == "Qwen3ForCausalLM"


@pytest.mark.slow
def test_a_server_gives_the_same_text(tmp_path: Path) -> None:
    """`transformers serve` on the export, asked over loopback, against decoding here."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    from openai import OpenAI

    backbone, spec = run_folder(tmp_path / "run")
    out = export(tmp_path / "run", "conversion", tmp_path / "out")
    (out / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    text = "the buyer of red nail polish often takes <c3> next"
    prompt = Request(0, tuple(backbone.tokenizer.encode(text, add_special_tokens=False)))
    options = DecodeOptions("autoregressive", 24, 1)
    found = decode(backbone.model, [prompt], options, eos_id=backbone.eos_id, spec=spec).completions[0]
    expected = backbone.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    with transformers_serve(out) as address:
        client = OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
        answer = client.chat.completions.create(
            model=str(out), messages=[{"role": "user", "content": text}], max_tokens=24
        )
    # this server repeats the prompt of a chat template that marks no turns
    assert str(answer.choices[0].message.content).removeprefix(text) == expected


def test_the_mask_token_is_never_generated(tmp_path: Path) -> None:
    _, spec = run_folder(tmp_path / "run")
    export(tmp_path / "run", "conversion", tmp_path / "out")
    values = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert values["suppress_tokens"] == [spec.mask_id] and not values.get("do_sample")
    export(tmp_path / "run", "ar_teacher", tmp_path / "teacher")
    assert "suppress_tokens" not in json.loads((tmp_path / "teacher" / "generation_config.json").read_text())


def test_an_export_is_a_stage_that_needs_no_base(tmp_path: Path) -> None:
    backbone, spec = run_folder(tmp_path / "run")
    export(tmp_path / "run", "conversion", tmp_path / "out")
    loaded, info = load_stage(tmp_path / "out")
    assert info.base is None and info.block_diffusion == spec
    assert (logits(loaded) - logits(backbone)).abs().max() < 1e-4


def test_only_an_earlier_export_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_folder(tmp_path / "run")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    export(tmp_path / "run", "ar_teacher", foreign)
    export(tmp_path / "run", "conversion", foreign)
    assert load_stage(foreign)[1].stage == "conversion"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("cat")
    (tmp_path / "file").write_text("text")
    for output, reason in (
        (tmp_path / "photos", "no earlier export"),
        (tmp_path / "run" / "ar_teacher", "no earlier export"),
        (tmp_path / "file", "a file, expected a folder"),
    ):
        words = [f"--run_dir={tmp_path / 'run'}", "--stage=conversion", f"--output={output}"]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert reason in error and str(output) in error and error.count("\n") == 1
    assert (tmp_path / "photos" / "cat.png").read_text() == "cat"
    assert load_stage(tmp_path / "run" / "ar_teacher")[1].stage == "ar_teacher"


def test_a_crash_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "run")

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("recbole_dgr2.model.checkpoint.weights_digest", crash)
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "run", "conversion", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("run_dir", "stage", "reason"),
    [
        ("run", "conversoin", "stage 'conversoin': .*run has ar_teacher, conversion"),
        ("run", "reinforcement", "has ar_teacher, conversion"),
        ("elsewhere", "conversion", "is no folder of a run"),
    ],
)
def test_no_such_stage(run_dir: str, stage: str, reason: str, tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    with pytest.raises(ValueError, match=reason):
        export(tmp_path / run_dir, stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()
