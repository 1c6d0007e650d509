"""Frozen views of a Config: each part of the program reads its options once, here, and never sees the Config.

Views of options that another module owns import that module when they are asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from recbole_dgr2.config import Config
    from recbole_dgr2.data.candidates import HeadOptions
    from recbole_dgr2.data.parts import SplitOptions
    from recbole_dgr2.data.prompt import TokenLimits
    from recbole_dgr2.decode.types import DecodeOptions, Mode
    from recbole_dgr2.model.adapters import AdapterOptions
    from recbole_dgr2.model.backbone import EmbeddedSpec
    from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
    from recbole_dgr2.model.noise import NoiseOptions
    from recbole_dgr2.trainer.options import StageOptions


@dataclass(frozen=True)
class RunOptions:
    """What is run and where. `threads` None: measure. `stages` in run order."""

    dataset: str
    data_folder: Path
    retriever: str
    seed: int
    run_dir: Path
    stages: tuple[str, ...]
    threads: int | None
    progress: bool


@dataclass(frozen=True)
class CandidateOptions:
    """Candidates of a list: `n` of them, from a retriever (or its `checkpoint`) or from the lists in `file`.

    `split`: how training lists are kept from their targets. `cache`: folder of what is kept between runs, or None.
    """

    n: int
    mask_history: bool
    split: SplitOptions
    max_train_lists: int
    history_length: int
    checkpoint: Path | None
    file: Path | None
    cache: Path | None

    def head(self, kmax: int) -> HeadOptions:
        """How score rows are cut: the candidates and, in any case, RecBole's max(topk) ids."""
        from recbole_dgr2.data.candidates import HeadOptions

        return HeadOptions(max(self.n, kmax), kmax, self.mask_history)


@dataclass(frozen=True)
class PromptOptions:
    """Item text columns (None: absent), prompt file, levels in which facts are worded, and points of the scores."""

    prompt: str
    fact_levels: int
    n_facts: int
    points_per_unit: float
    title_field: str | None
    category_field: str | None
    brand_field: str | None


@dataclass(frozen=True)
class SidOptions:
    """Semantic IDs from `source`: "kmeans", "rqvae" or an index file; None: none. `levels` of `codes` each.

    `embeddings`: "text", "retriever", or the folder of a sentence-transformers model.
    """

    source: str | None
    levels: int
    codes: int
    embeddings: str
    seed: int
    progress: bool


@dataclass(frozen=True)
class TraceOptions:
    """Where reasoning traces come from and which are kept; see properties/model/DGR2.yaml.

    `max_tokens`: most tokens of a trace. `api_key_env`: name of the variable that holds a server's key.
    """

    source: Literal["evidence", "hf", "openai"]
    mode: Literal["all", "rejection", "targeted"]
    attempts: int
    temperature: float
    model: str | None
    base_url: str | None
    api_key_env: str | None
    concurrency: int
    timeout: float
    max_tokens: int

    @property
    def plain(self) -> bool:
        """Whether every list gets the reasoner's own trace."""
        return self.source == "evidence" and self.mode == "all"


@dataclass(frozen=True)
class ReportOptions:
    """Sizes of the samples behind validity (users), speed (users at batch 1) and intervals (resamples)."""

    validity_sample: int
    speed_requests: int
    bootstrap_samples: int
    topk: tuple[int, ...]


def run_options(config: Config) -> RunOptions:
    """The run itself; its folder defaults to <checkpoint_dir>/<dataset>-<retriever>-<seed>."""
    default = Path(config["checkpoint_dir"]) / f"{config['dataset']}-{config['retriever']}-{config['seed']}"
    return RunOptions(
        dataset=config["dataset"],
        data_folder=Path(config["data_path"]),
        retriever=config["retriever"],
        seed=config["seed"],
        run_dir=default if config["run_dir"] is None else Path(config["run_dir"]),
        stages=tuple(config["stages"]),
        threads=None if config["threads"] == "auto" else config["threads"],
        progress=config["show_progress"],
    )


def candidate_options(config: Config) -> CandidateOptions:
    """Candidates and histories."""
    from recbole_dgr2.config import retriever_seed
    from recbole_dgr2.data.parts import SplitOptions

    checkpoint, file, cache = (config[key] for key in ("retriever_checkpoint", "candidate_file", "cache_dir"))
    kept = Path(config["checkpoint_dir"]) / "cache" if cache == "auto" else cache
    return CandidateOptions(
        n=config["n_candidates"],
        mask_history=config["mask_history"],
        split=SplitOptions(
            config["candidate_split"], config["train_last_m"], config["n_folds"], retriever_seed(config)
        ),
        max_train_lists=config["max_train_lists"],
        history_length=config["history_length"],
        checkpoint=None if checkpoint is None else Path(checkpoint),
        file=None if file is None else Path(file),
        cache=None if kept is None else Path(kept),
    )


def prompt_options(config: Config) -> PromptOptions:
    """Prompt, item text and traces."""
    return fill(PromptOptions, config)


def sid_options(config: Config) -> SidOptions:
    """Semantic IDs."""
    return SidOptions(
        source=config["semantic_ids"],
        levels=config["sid_levels"],
        codes=config["sid_codes"],
        embeddings=config["sid_embeddings"],
        seed=config["seed"],
        progress=config["show_progress"],
    )


def trace_options(config: Config) -> TraceOptions:
    """Reasoning traces.

    Raises:
        ValueError: a key that the source needs is missing, or the keys do not fit together.
    """
    options: TraceOptions = fill(TraceOptions, config, prefix="trace_", max_tokens=config["max_new_tokens"])
    if options.source != "evidence" and options.model is None:
        expected = "a folder of a causal LM" if options.source == "hf" else "the model's name on the server"
        raise ValueError(f"trace_model: trace_source {options.source} needs {expected}")
    if options.source == "openai" and options.base_url is None:
        raise ValueError("trace_base_url: trace_source openai needs one, e.g. http://localhost:8000/v1")
    if options.api_key_env is not None and not options.api_key_env.isidentifier():
        # not shown: it may be the key itself
        raise ValueError("trace_api_key_env: expected the name of an environment variable that holds the key")
    if options.temperature == 0 and options.attempts > 1 and not options.plain:
        raise ValueError(
            f"trace_temperature is 0: all {options.attempts} attempts would be the same; expected more than 0, "
            "or trace_attempts 1"
        )
    return options


def token_limits(config: Config) -> TokenLimits:
    """Token budgets of a prompt's parts."""
    from recbole_dgr2.data.prompt import TokenLimits

    return TokenLimits(candidate=config["candidate_tokens"], history=config["history_tokens"])


def report_options(config: Config) -> ReportOptions:
    """The report's sample sizes."""
    return fill(ReportOptions, config, topk=tuple(config["topk"]))


def embedded_spec(config: Config) -> EmbeddedSpec:
    """Shape of the embedded backbone."""
    from recbole_dgr2.model.backbone import EmbeddedSpec

    return fill(EmbeddedSpec, config, prefix="embedded_")


def adapter_options(config: Config) -> AdapterOptions | None:
    """Size of the adapters; None where all weights are trained."""
    from recbole_dgr2.model.adapters import AdapterOptions

    targets = tuple(map(str, config["lora_targets"] or ()))
    return AdapterOptions(config["lora_rank"], config["lora_alpha"], targets) if config["lora_rank"] else None


def block_diffusion_spec(config: Config, mask_id: int) -> BlockDiffusionSpec:
    """The block-diffusion contract of a run, for a backbone whose mask token is `mask_id`."""
    from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec

    return BlockDiffusionSpec(block_size=config["block_size"], mask_id=mask_id, context=config["context"])


def noise_options(config: Config) -> NoiseOptions:
    """Noise of the conversion stage."""
    from recbole_dgr2.model.noise import NoiseOptions

    return fill(NoiseOptions, config, prefix="conversion_")


def stage_options(config: Config, stage: str) -> StageOptions:
    """Training options of one stage, from the keys that begin with its name."""
    from recbole_dgr2.trainer.options import StageOptions

    return fill(StageOptions, config, prefix=f"{stage}_", **training_options(config))


def training_options(config: Config) -> dict[str, Any]:
    """What is the same for the training of every stage, as fields of `StageOptions`."""
    return {
        "seed": config["seed"],
        "progress": config["show_progress"],
        "micro_batch_size": config["micro_batch_size"],
        "mixed_precision": "no" if config["precision"] == "fp32" else config["precision"],
        "gradient_checkpointing": config["gradient_checkpointing"],
    }


def mid_training_options(config: Config) -> StageOptions:
    """Training options of the stage mid_training: no validation, every token of a response weighs the same."""
    from recbole_dgr2.trainer.options import StageOptions

    fixed = {"eval_step": 0, "stopping_step": 0, "reasoning_weight": 0.0, "answer_weight": 1.0}
    return fill(StageOptions, config, prefix="mid_training_", **training_options(config), **fixed)


def answer_mode(config: Config, converted: bool) -> Mode:
    """How a model of the run answers in its report and in `recommend`."""
    mode: Mode = config["decode_mode"] if converted else "autoregressive"
    return mode


def decode_options(config: Config, mode: Mode, batch_size: int | None = None) -> DecodeOptions:
    """Decoding options in one mode; `batch_size` replaces decode_batch_size, for measurements at batch 1."""
    from recbole_dgr2.decode.types import DecodeOptions

    return DecodeOptions(
        mode=mode,
        max_new_tokens=config["max_new_tokens"],
        batch_size=config["decode_batch_size"] if batch_size is None else batch_size,
        tau=config["tau"],
        block_size=config["block_size"] if mode == "block" else None,
        seed=config["seed"],
    )


def fill(view: Any, config: Config, prefix: str = "", **values: Any) -> Any:
    """A dataclass from the config's keys `<prefix><field>`; fields without a key keep their default."""
    names = [field.name for field in dataclasses.fields(view)]
    read = {name: config[prefix + name] for name in names if prefix + name in config}
    return view(**{**read, **values})
