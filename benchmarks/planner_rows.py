"""Published measurements as a model, a plan, a cluster and the measured value.

What a source leaves open (the micro-batch, stages per pipeline rank) is the fastest of 1, 2, 4, 8, as people tune it;
what it measured is never looked at for that. What a row leaves out but its source says is cited here.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from course_lib.planning import cost, hardware, models
from course_lib.planning.plan import Checkpointing, Plan

TRITON_ATTENTION = (0.37, 0.25)
"""Share of an A100's peak that the first FlashAttention reaches in Triton, forward and backward, the causal half and
2.5 backward FLOPs counted as here: Triton's own regression test (triton-lang/triton,
python/test/regression/test_performance.py, ``flash_attention_data``). FlashAttention-2's paper says 25 to 40 %."""
ROCE = 200e9
"""Bytes/s of a node's network in MosaicML's A100 tables: 1,600 Gb/s by their headings."""
GRAND_TETON = {"bandwidth": 2.4e12, "peak": (1 + 835 / 989) / 2}
"""torchtitan's H100: HBM2e at 2.4 TB/s, limited to 500 W; of its peak the source says only that it lies between SXM's
(989 TFLOP/s, the datasheet's) and NVL's (835), so the middle (benchmarks/llama3_h100_202412_torchtitan.md, note 2)."""
OF_2021 = {"flash": False, "overlap": False, "precision": "fp16"}
"""No fused attention, and gradients summed after the backward pass."""
RECOMPUTED = {"checkpointing": "full", "sequence_parallel": False}

Setting = tuple[models.Model, Plan, hardware.Cluster, float]
"""Model, plan, cluster, and the measured tokens/s per GPU."""


@functools.cache
def gpt(hidden: int, layers: int, heads: int, vocab: int, sequence: int, dropout: float = 0.1) -> models.Model:
    """A GPT of Megatron's or MosaicML's sizes."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "n_positions": sequence}
    more = {"model_type": "gpt2", "resid_pdrop": dropout, "activation_function": "gelu"}
    return models.from_config(sizes | more)


def llama(
    hidden: int, layers: int, heads: int, key_heads: int, ffn: int, vocab: int, tied: bool = False
) -> models.Model:
    """A Llama that the catalogue does not have."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": ffn, "vocab_size": vocab}
    attention = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return models.from_config({"model_type": "llama", "tie_word_embeddings": tied} | sizes | attention)


def axes(c: dict[str, Any]) -> dict[str, int]:
    """Ranks by axis, by the names that most tables have; ``data`` where the table has it."""
    found = {"tensor": c.get("tp", 1), "pipeline": c.get("pp", 1), "context": c.get("cp", 1)}
    return found | ({"data": c["dp"]} if "dp" in c else {})


def fastest(settings: list[Setting]) -> Setting:
    """Of what a source leaves open, the choice with which the planner is fastest."""
    return max(settings, key=lambda each: cost.estimate(*each[:3]).tokens_per_second)


def open_choices(
    model: models.Model,
    base: dict[str, Any],
    batch: int,
    cluster: hardware.Cluster,
    tokens: float,
    micro: int | None = None,
) -> Setting:
    """Every micro-batch (and stages per rank, where the schedule is interleaved) that makes up the global batch."""
    sequences = batch // base["data"]
    settings = []
    for size in (1, 2, 4, 8) if micro is None else (micro,):
        for virtual in (1, 2, 3, 4) if base.get("schedule") == "interleaved" and "virtual" not in base else (None,):
            if sequences % size or (virtual or 1) * base.get("pipeline", 1) > model.layers:
                continue
            plan = base | ({"virtual": virtual} if virtual else {})
            settings.append((model, Plan(**plan, micro_batch=size, accumulation=sequences // size), cluster, tokens))
    return fastest(settings)


def megatron_tokens(model: models.Model, tflops: float, sequence: int, passes: int) -> float:
    """Tokens/s from FLOP/s in Megatron's count, arXiv 2104.04473 section 5.1; ``passes`` 4 with recomputation."""
    h = model.hidden
    per_token = 24 * passes * model.layers * h * h * (1 + sequence / 6 / h) + 6 * h * model.vocab
    return tflops * 1e12 / per_token


def megatron_2021(row: dict[str, Any]) -> Setting | None:
    """A run of Megatron-LM's first tables, and later ones of H100."""
    c = row["config"]
    if "tp" not in c or "iteration_ms" in row["value"]:
        return None
    h100 = c["gpu"] == "H100"
    model = gpt(c["hidden"], c["layers"], c["heads"], c["vocab"], c["seq"])
    tokens = megatron_tokens(model, row["value"]["tflops_per_gpu"], c["seq"], 3 if h100 else 4)
    base = axes(c) | {"sequence_length": c["seq"], "engine": "megatron", "compiled": True}
    base |= {"schedule": "interleaved" if c["pp"] > 1 else "1f1b"}
    base |= {"stage": 1, "overlap_tensor": True} if h100 else OF_2021 | RECOMPUTED
    return open_choices(model, base, c["batch"], hardware.cluster("H100" if h100 else "A100-80", c["gpus"]), tokens)


def megatron_iteration(row: dict[str, Any]) -> Setting | None:
    """A run of 530 B parameters whose step's seconds were published."""
    c = row["config"]
    seconds = row["value"].get("iteration_s_selective_sp") or row["value"].get("iteration_s")
    if seconds is None or c.get("model") != "530B":  # whose sizes are below; a later row of it leaves them out
        return None
    base = axes(c) | {"sequence_length": 2048, "engine": "megatron", "compiled": True, "checkpointing": "selective"}
    base |= {"schedule": "interleaved", "virtual": 3} | OF_2021
    model = gpt(20480, 105, 128, 51200, 2048)
    tokens = c["global_batch"] * 2048 / seconds / c["gpus"]
    return open_choices(model, base, c["global_batch"], hardware.cluster("A100-80", c["gpus"]), tokens, 1)


def zero3_against_ptd(row: dict[str, Any]) -> Setting:
    """A run of the table of 2021 that sets ZeRO-3 beside tensor, pipeline and data parallelism."""
    c = row["config"]
    model = gpt(20480, 105, 128, 51200, 2048) if c["params_B"] > 500 else gpt(12288, 96, 96, 51200, 2048)
    tokens = megatron_tokens(model, row["value"]["tflops_per_gpu"], 2048, 4)
    base = {"sequence_length": 2048, "compiled": True} | OF_2021 | RECOMPUTED
    if "ZeRO" in c["scheme"]:
        base |= {"engine": "deepspeed", "stage": 3, "data": c["gpus"], "overlap": True}
    else:
        base |= {"engine": "megatron", "tensor": 8, "pipeline": 35, "data": c["gpus"] // 280, "schedule": "interleaved"}
    return open_choices(model, base, c["batch"], hardware.cluster("A100-80", c["gpus"]), tokens, c["microbatch"])


def llama_405b(row: dict[str, Any]) -> Setting:
    """A run of the paper on Llama 3."""
    c = row["config"]
    model = models.load("llama-405b")
    tokens = row["value"]["tflops_per_gpu"] * 1e12 / model.flops(c["seq"] // 2)  # counts the causal half
    base = axes(c) | {"sequence_length": c["seq"], "engine": "fsdp", "stage": 3, "compiled": True}
    base |= {"schedule": "interleaved"}
    return open_choices(model, base, c["dp"] * c["batch_per_dp"], hardware.cluster("H100", c["gpus"]), tokens, 1)


def mosaic(row: dict[str, Any], flash2: bool = False) -> Setting:
    """A step of MosaicML's.

    The tables' script sets ``attn_impl`` to ``triton``, as the models' YAML files do (mosaicml/llm-foundry,
    scripts/train/benchmarking/submit_benchmarks.py at 12a63191, scripts/train/yamls): FlashAttention of the first
    version. For H100, on which nobody published that kernel's rate, it is read as the catalogue's FlashAttention-2;
    the sweep of large clusters (sweep.py there) took either.

    Args:
        row: of published.json.
        flash2: read A100's rows with the catalogue's FlashAttention-2 too, against what the script says.
    """
    c = row["config"]
    name = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}[c["gpu"]]
    cluster = hardware.cluster(name, c["gpus"], network=None if name == "H100" else ROCE)
    if name != "H100" and not flash2:
        peak = cluster.accelerator.peak["bf16"]
        rates = TRITON_ATTENTION[0] * peak, TRITON_ATTENTION[1] * peak
        cluster = replace(cluster, accelerator=replace(cluster.accelerator, attention=rates))
    plan = Plan(
        c["seq"],
        "fsdp",
        3,
        data=c["gpus"],
        micro_batch=int(c["microbatch"]),
        compiled=False,
        accumulation=int(c["grad_accum"]),
        checkpointing="full" if c["activation_checkpointing"] else "none",
        precision="fp8" if c["precision"] == "amp_fp8" else "bf16",
        recipe="mixed" if c["mp_mode"] == "PURE" else "autocast",
    )
    model = gpt(c["hidden"], c["layers"], c["heads"], c["vocab"], c["seq"], dropout=0.0)
    return model, plan, cluster, row["value"]["tokens_per_s_per_gpu"]


def nanotron(row: dict[str, Any]) -> Setting:
    """A run of nanotron, which compiles nothing."""
    c = row["config"]
    model = llama(*(c[name] for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings")))
    batch = {"micro_batch": c["mbs"], "accumulation": c["grad_accum"]}
    plan = Plan(c["seq"], "megatron", c["zero"], **axes(c), **batch, recipe="mixed, fp32 gradients")
    measured = row["value"].get("tokens_per_s_per_gpu") or (
        row["value"]["mfu_pct"] / 100 * 989e12 / model.flops(c["seq"])
    )
    return model, plan, hardware.cluster("H100", c.get("gpus", plan.gpus)), measured


def torchtitan(row: dict[str, Any]) -> Setting | None:
    """A run of torchtitan's tables."""
    c, value = row["config"], row["value"]
    if "tokens_per_s_per_gpu" not in value and "tokens_per_s_per_gpu_vanilla_tp" not in value:
        return None
    size = re.fullmatch(r"Llama ?3(?:\.1)? (405B|70B|8B)", c["model"])
    if size is None or c["ac"] not in CHECKPOINTING or not isinstance(c.get("local_batch", 1), int):
        return None  # another model, or a label that does not say what was run
    low = c.get("float8") or "float8" in f"{c.get('opt')}{c.get('quantization')}"
    staged, local = c.get("pp", 1) > 1, c.get("local_batch", 1)
    plan = Plan(
        c.get("seq", 8192),
        "fsdp",
        3,
        **axes(c) | {"data": c["fsdp"]},
        micro_batch=1 if staged else local,
        accumulation=local if staged else 1,
        checkpointing=CHECKPOINTING[c["ac"]],
        compiled=c.get("compile", "opt" in c),
        precision="fp8" if low else "bf16",
        overlap_tensor=bool(c.get("async_tp")) or "asyncTP" in c.get("opt", ""),
    )
    measured = value.get("tokens_per_s_per_gpu") or value["tokens_per_s_per_gpu_vanilla_tp"]
    return models.load(f"llama-{size[1].lower()}"), plan, _titan_cluster(c), measured


CHECKPOINTING: dict[str, Checkpointing] = {
    "full": "full",
    "selective (op)": "operators",
    "selective op": "operators",
    "per-op SAC": "operators",
    "selective layer": "alternate",
}
"""torchtitan's names; a "selective layer" recomputes every second block by default."""


def _titan_cluster(c: dict[str, Any]) -> hardware.Cluster:
    cluster = hardware.cluster("A100-80" if "A100" in c.get("gpu", "") else "H100", c["gpus"])
    if "2.4TB/s" not in c.get("gpu", ""):
        return cluster
    chip = cluster.accelerator
    peak = {dtype: rate * GRAND_TETON["peak"] for dtype, rate in chip.peak.items()}
    return replace(cluster, accelerator=replace(chip, bandwidth=GRAND_TETON["bandwidth"], peak=peak))


def megatron_bridge(row: dict[str, Any]) -> Setting | None:
    """A run of Megatron Bridge's performance summaries."""
    c = row["config"]
    name = c["system"].removeprefix("DGX-")
    precision = c.get("Precision") or "FP8"
    if not c["model"].startswith("LLAMA3") or name not in hardware.accelerators() or precision == "NVFP4":
        return None
    model = models.load("llama-" + c["model"].split("_")[1].lower())
    ranks = {"tensor": int(c["TP"]), "pipeline": int(c["PP"]), "context": int(c["CP"])}
    data = int(c["#-GPUs"]) // (ranks["tensor"] * ranks["pipeline"] * ranks["context"])
    virtual = {} if c["VP"] in ("n/a", 1.0) else {"schedule": "interleaved", "virtual": int(c["VP"])}
    plan = Plan(
        int(c["Sequence Length"]),
        "fsdp" if c.get("FSDP") else "megatron",
        3 if c.get("FSDP") else 1,
        data=data,
        **ranks,
        **virtual,
        micro_batch=int(c["MBS"]),
        accumulation=max(1, round(c["GBS"] / data / c["MBS"])),
        compiled=True,
        overlap_tensor=True,
        precision="bf16" if precision == "BF16" else "fp8",
    )
    tokens = float(str(row["value"]["tokens_per_s_per_gpu"]).split(" ")[0])
    return model, plan, hardware.cluster(name, plan.gpus), tokens


ZERO_BUBBLE_SIZES = {"1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096), "14.6B": (46, 40, 5120), "28.3B": (62, 48, 6144)}
"""Blocks, heads and hidden size of arXiv 2401.10241's models (table 3)."""
ZERO_BUBBLE_SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb_h1", "ZB-2p": "zb_h2", "ZB-V": "zbv"}


def zero_bubble(row: dict[str, Any]) -> Setting | None:
    """A run of arXiv 2401.10241: Megatron-LM of 2023 with sequences of 1,024, attention written out, one replica.

    Its interleaved schedule has as many stages as there are layers, two of which embedding and output layer stand for.
    ZB-2p* of its second version has another micro-batch than its row says, and two rows give ranges.
    """
    c, samples = row["config"], row["value"].get("samples_per_gpu_per_s")
    schedule, sizes = ZERO_BUBBLE_SCHEDULES.get(c["schedule"]), ZERO_BUBBLE_SIZES.get(c["model"])
    if schedule is None or sizes is None or not isinstance(samples, float | int):
        return None
    layers, heads, hidden = sizes
    base = {"sequence_length": 1024, "engine": "megatron", "data": 1, "pipeline": c["p"], "schedule": schedule}
    base |= {"compiled": True, "flash": False}
    if schedule == "interleaved":
        base["virtual"] = (layers + 2) // c["p"]
    model, cluster = gpt(hidden, layers, heads, 50304, 1024), hardware.cluster("A100-80", c["p"])
    return open_choices(model, base, c["m"] * c["microbatch"], cluster, samples * 1024, c["microbatch"])


NEMO_GPT3 = {"GPT3-5B": (4096, 24, 32), "GPT3-20B": (6144, 44, 48), "GPT3-175B": (12288, 96, 96)}
"""Hidden size, blocks and heads of NeMo's GPT-3 recipes (NVIDIA/NeMo, nemo/collections/llm/gpt/model/megatron)."""


def nemo(row: dict[str, Any]) -> Setting:
    """A run of NeMo's performance guides; of long sequences, 4 Mi tokens per step where the table names no batch.

    Its FLOPs count attention whole: in NVIDIA's summary of the same release 16,934 tokens/s of Llama 2 7B are 780
    TFLOP/s, which are 6 per parameter beside the embedding and 12 per layer, channel and key.
    """
    c, sequence, ranks = row["config"], row["config"]["seq"], axes(row["config"])
    name = c["model"].removesuffix("-sft")
    model = gpt(*NEMO_GPT3[name], 50304, sequence, dropout=0.0) if name in NEMO_GPT3 else models.load(name)
    data = c["gpus"] // (ranks["tensor"] * ranks["pipeline"] * ranks["context"])
    batch, micro, virtual = c.get("global_batch", max(data, 2**22 // sequence)), c.get("micro_batch", 1), c.get("vp", 1)
    plan = Plan(
        sequence,
        "fsdp" if c.get("fsdp") else "megatron",
        3 if c.get("fsdp") else 1,
        **ranks | {"data": data},
        micro_batch=micro,
        accumulation=max(1, batch // data // micro),
        compiled=True,
        overlap_tensor=True,
        precision="fp8",
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual=virtual,
    )
    value = row["value"]
    tokens = value.get("tokens_per_s_per_gpu") or value["tflops_per_gpu"] * 1e12 / model.flops(sequence)
    return model, plan, hardware.cluster(c["system"], c["gpus"]), tokens


def fms(row: dict[str, Any]) -> Setting:
    """A run of fms-fsdp, compiled and with PyTorch's fused attention; HSDP has a copy on each node."""
    c = row["config"]
    code_llama = llama(8192, 48, 64, 8, 22016, 32000)
    model = code_llama if c["model"] == "34B" else models.load(f"llama-2-{c['model'].lower()}")
    replicas = c["gpus"] // 8 if c["sharding"] == "HSDP" else 1
    held = {"micro_batch": c["micro_batch"], "checkpointing": c["ac"], "replicas": replicas}
    plan = Plan(c["seq"], "fsdp", 3, data=c["gpus"], compiled=True, **held)
    return model, plan, hardware.cluster(c["gpu"], c["gpus"]), row["value"]["tokens_per_s_per_gpu"]


def easy_context(row: dict[str, Any]) -> Setting:
    """A run of EasyContext: ZeRO-3 with everything offloaded, whole blocks recomputed, one sequence per step."""
    c = row["config"]
    shared = c["gpus"] if c["how"] == "ring attention" else 1
    saved = {"checkpointing": "full", "offload": "parameters", "loss": "linear"}
    plan = Plan(c["seq"], "deepspeed", 3, data=c["gpus"] // shared, context=shared, **saved)
    measured = row["value"]["tokens_per_s"] / c["gpus"]
    return models.load(c["model"]), plan, hardware.cluster(c["gpu"], c["gpus"]), measured


READERS: dict[str, tuple[str, Callable[[dict[str, Any]], Setting | None]]] = {
    "weak_scaling_throughput": ("Megatron, weak scaling", megatron_2021),
    "iteration_time": ("Megatron, iteration", megatron_iteration),
    "zero3_vs_ptd_throughput": ("ZeRO-3 against 3-D", zero3_against_ptd),
    "parallel_config_throughput": ("Llama 3 405B", llama_405b),
    "fsdp_throughput": ("MosaicML FSDP", mosaic),
    "best_config": ("nanotron, best", nanotron),
    "measured_memory_throughput": ("nanotron, logs", nanotron),
    "fsdp_throughput_memory": ("torchtitan FSDP", torchtitan),
    "tp_throughput_memory": ("torchtitan TP", torchtitan),
    "cp_throughput_memory": ("torchtitan CP", torchtitan),
    "megatron_bridge_throughput": ("Megatron Bridge", megatron_bridge),
    "pp_throughput_memory": ("zero bubble", zero_bubble),
    "long_sequence_throughput": ("NeMo, long sequences", nemo),
    "nemo_throughput": ("NeMo", nemo),
    "fms_throughput": ("fms-fsdp", fms),
    "ring_throughput": ("EasyContext", easy_context),
}
"""By the rows' kind: what the table calls it, and how a row is read; a row that no plan can say gives None."""
