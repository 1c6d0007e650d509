"""A finished stage as a plain Hugging Face folder, which any autoregressive server or AutoModelForCausalLM loads.

python -m recbole_dgr2.export --run_dir=saved/ml-100k-ItemKNN-2020 --stage=conversion --output=exported

An adapter is merged into the weights. The folder holds config.json, safetensors, tokenizer and generation_config.json
(greedy, the run's end-of-sequence token, the mask token never), so that the autoregressive text is that of the run;
decoding in blocks needs this package, which finds what it needs in dgr2.json.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_dgr2.model.backbone import Backbone, hide_progress_bars
from recbole_dgr2.model.checkpoint import INFO_FILE, StageInfo, load_stage, save_stage
from recbole_dgr2.pipeline.open_run import STAGES
from recbole_dgr2.pipeline.run_files import RUN_FILE
from recbole_dgr2.system.command import Arguments, command, command_parser


def export(run_dir: Path, stage: str, output: Path) -> Path:
    """Write a stage of a finished run into the folder `output`, whole or not at all, and give that back.

    Args:
        run_dir: folder of the run.
        stage: one that it finished.
        output: a new or empty folder, or an earlier export, which is replaced.

    Raises:
        ValueError: no such stage, or the folder holds something else.
    """
    finished = [name for name in STAGES if (run_dir / name / INFO_FILE).is_file()]
    if stage not in finished:
        has = f"has {', '.join(finished)}" if finished else "is no folder of a run that finished a stage"
        raise ValueError(f"stage {stage!r}: {run_dir} {has}")
    _refuse_foreign(output)
    backbone, info = load_stage(run_dir / stage)
    _set_generation(backbone, info)
    save_stage(output, backbone, replace(info, base=None))
    return output


def _refuse_foreign(output: Path) -> None:
    if output.is_file():
        raise ValueError(f"output {output}: a file, expected a folder")
    if not output.is_dir() or not any(output.iterdir()):
        return
    exported = (output / INFO_FILE).is_file() and (output / "generation_config.json").is_file()
    if not exported or (output.name in STAGES and (output.parent / RUN_FILE).is_file()):
        raise ValueError(f"output {output}: not empty and no earlier export; expected a new or empty folder")


def _set_generation(backbone: Backbone, info: StageInfo) -> None:
    """What `generate` and servers read: greedy decoding that ends where the run's own decoding does."""
    model: Any = backbone.model
    spec = info.block_diffusion
    model.generation_config = type(model.generation_config)(
        do_sample=False,
        bos_token_id=backbone.tokenizer.bos_token_id,
        eos_token_id=backbone.eos_id,
        pad_token_id=backbone.pad_id,
        suppress_tokens=None if spec is None else [spec.mask_id],
    )
    model.config.eos_token_id, model.config.pad_token_id = backbone.eos_id, backbone.pad_id
    model.config.use_cache = True


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("export", __doc__)
    parser.add_argument("--run_dir", required=True, type=Path, help="folder of a finished run")
    parser.add_argument("--stage", required=True, help=f"one of {', '.join(STAGES)}")
    parser.add_argument(
        "--output", required=True, type=Path, help="new or empty folder, or an earlier export"
    )
    known = parser.parse_args(arguments)
    hide_progress_bars()
    folder = export(known.run_dir, known.stage, known.output)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    sys.exit(main())
