"""The planner's predictions beside published measurements: tokens/s a GPU, error by kind, worst rows.

    python benchmarks/planner.py                # compare, and write benchmarks/planner.md
    python benchmarks/planner.py --calibrate    # print the matmul shares of catalogue/hardware.yaml

The shares of peak come from the steps in catalogue/calibration.yaml,
which were published elsewhere. What a source leaves open (the micro-batch, stages a pipeline rank) is the fastest
of 1, 2, 4, 8, as people tune it; what it measured is never looked at for that.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from course_lib.config_files import write_text
from course_lib.planning import cost, hardware, memory, models
from course_lib.planning.plan import Plan

HERE = Path(__file__).parent
PUBLISHED = HERE.parent / "tests/unit/data/published.json"
CALIBRATION = HERE.parent / "course_lib/planning/catalogue/calibration.yaml"

Setting = tuple[models.Model, Plan, hardware.Cluster, float]
"""Model, plan, cluster, and the measured tokens/s a GPU."""


@dataclass(frozen=True)
class Compared:
    """A published row and what the planner says."""

    row: str
    kind: str
    quantity: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.predicted / self.measured - 1


def gpt(hidden: int, layers: int, heads: int, vocab: int, sequence: int, dropout: float = 0.1) -> models.Model:
    """A GPT of Megatron's or MosaicML's sizes."""
    return models.from_config({"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads,
                               "vocab_size": vocab, "n_positions": sequence, "resid_pdrop": dropout,
                               "activation_function": "gelu"})


def fastest(settings: list[Setting]) -> Setting:
    """Of what a source leaves open, the choice with which the planner is fastest."""
    return max(settings, key=lambda each: cost.estimate(*each[:3]).tokens_per_second)


def open_choices(model: models.Model, base: dict[str, Any], batch: int, cluster: hardware.Cluster,
                 tokens: float, micro: int | None = None) -> Setting:
    """Every micro-batch (and stages a rank, where the schedule is interleaved) that makes up the global batch."""
    sequences = batch // base["data"]
    settings = []
    for size in (1, 2, 4, 8) if micro is None else (micro,):
        for virtual in (1, 2, 3, 4) if base.get("schedule") == "interleaved" and "virtual" not in base else (None,):
            if sequences % size or (virtual or 1) * base.get("pipeline", 1) > model.layers:
                continue
            extra = {"virtual": virtual} if virtual else {}
            settings.append((model, Plan(**{**base, **extra}, micro_batch=size, accumulation=sequences // size),
                             cluster, tokens))
    return fastest(settings)


def megatron_tokens(model: models.Model, tflops: float, sequence: int, passes: int) -> float:
    """Tokens/s from FLOP/s in Megatron's count, arXiv 2104.04473 section 5.1; ``passes`` 4 with recomputation."""
    h = model.hidden
    per_token = 24 * passes * model.layers * h * h * (1 + sequence / 6 / h) + 6 * h * model.vocab
    return tflops * 1e12 / per_token


def megatron_2021(row: dict[str, Any]) -> Setting | None:
    c = row["config"]
    if "tp" not in c or "iteration_ms" in row["value"]:
        return None
    h100 = c["gpu"] == "H100"
    model = gpt(c["hidden"], c["layers"], c["heads"], c["vocab"], c["seq"])
    tokens = megatron_tokens(model, row["value"]["tflops_per_gpu"], c["seq"], 3 if h100 else 4)
    base = {"sequence_length": c["seq"], "engine": "megatron", "data": c["dp"], "tensor": c["tp"],
            "pipeline": c["pp"], "compiled": True, "schedule": "interleaved" if c["pp"] > 1 else "1f1b"}
    if h100:
        base |= {"stage": 1, "overlap_tensor": True}
    else:  # 2021: no fused attention, no sequence parallelism, gradients summed after the backward pass
        base |= {"checkpointing": "full", "flash": False, "sequence_parallel": False, "overlap": False,
                 "precision": "fp16"}
    return open_choices(model, base, c["batch"], hardware.cluster("H100" if h100 else "A100-80", c["gpus"]), tokens)


def megatron_iteration(row: dict[str, Any]) -> Setting | None:
    c = row["config"]
    seconds = row["value"].get("iteration_s_selective_sp") or row["value"].get("iteration_s")
    if seconds is None:
        return None
    base = {"sequence_length": 2048, "engine": "megatron", "data": c["dp"], "tensor": c["tp"], "pipeline": c["pp"],
            "compiled": True, "schedule": "interleaved", "virtual": 3, "checkpointing": "selective",
            "flash": False, "overlap": False, "precision": "fp16"}
    model = gpt(20480, 105, 128, 51200, 2048)
    tokens = c["global_batch"] * 2048 / seconds / c["gpus"]
    return open_choices(model, base, c["global_batch"], hardware.cluster("A100-80", c["gpus"]), tokens, 1)


def zero3_against_ptd(row: dict[str, Any]) -> Setting:
    c = row["config"]
    big = c["params_B"] > 500
    model = gpt(20480, 105, 128, 51200, 2048) if big else gpt(12288, 96, 96, 51200, 2048)
    tokens = megatron_tokens(model, row["value"]["tflops_per_gpu"], 2048, 4)
    cluster = hardware.cluster("A100-80", c["gpus"])
    base = {"sequence_length": 2048, "checkpointing": "full", "flash": False, "compiled": True, "precision": "fp16",
            "sequence_parallel": False}
    if "ZeRO" in c["scheme"]:
        base |= {"engine": "deepspeed", "stage": 3, "data": c["gpus"]}
    else:
        base |= {"engine": "megatron", "tensor": 8, "pipeline": 35, "data": c["gpus"] // 280,
                 "schedule": "interleaved", "overlap": False}
    return open_choices(model, base, c["batch"], cluster, tokens, c["microbatch"])


def llama_405b(row: dict[str, Any]) -> Setting:
    c = row["config"]
    model = models.load("llama-405b")
    tokens = row["value"]["tflops_per_gpu"] * 1e12 / model.flops(c["seq"] // 2)  # counts the causal half
    base = {"sequence_length": c["seq"], "engine": "fsdp", "stage": 3, "data": c["dp"], "tensor": c["tp"],
            "pipeline": c["pp"], "context": c["cp"], "compiled": True, "schedule": "interleaved"}
    return open_choices(model, base, c["dp"] * c["batch_per_dp"], hardware.cluster("H100", c["gpus"]), tokens, 1)


def mosaic(row: dict[str, Any], triton: bool = False) -> Setting:
    """A step of MosaicML's; ``triton``: on A100 with the first FlashAttention's kernel, which the rows do not name."""
    c = row["config"]
    name = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}[c["gpu"]]
    cluster = hardware.cluster(name, c["gpus"])
    if triton and name != "H100":  # 25 to 40 % of peak, arXiv 2307.08691 section 1
        rate = 0.325 * cluster.accelerator.peak["bf16"]
        cluster = replace(cluster, accelerator=replace(cluster.accelerator, attention=(rate, rate)))
    plan = Plan(c["seq"], "fsdp", 3, data=c["gpus"], micro_batch=int(c["microbatch"]), compiled=False,
                accumulation=int(c["grad_accum"]), checkpointing="full" if c["activation_checkpointing"] else "none",
                precision="fp8" if c["precision"] == "amp_fp8" else "bf16",
                recipe="mixed" if c["mp_mode"] == "PURE" else "autocast")
    model = gpt(c["hidden"], c["layers"], c["heads"], c["vocab"], c["seq"], dropout=0.0)
    return model, plan, cluster, row["value"]["tokens_per_s_per_gpu"]


def nanotron(row: dict[str, Any]) -> Setting:
    c = row["config"]
    model = models.from_config({
        "model_type": "llama", "hidden_size": c["hidden"], "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"], "num_key_value_heads": c["kv_heads"], "intermediate_size": c["ffn"],
        "vocab_size": c["vocab"], "tie_word_embeddings": c["tied_embeddings"]})
    plan = Plan(c["seq"], "megatron", c["zero"], data=c["dp"], tensor=c["tp"], pipeline=c["pp"],
                micro_batch=c["mbs"], accumulation=c["grad_accum"], recipe="mixed, fp32 gradients", compiled=True)
    measured = row["value"].get("tokens_per_s_per_gpu") or (
        row["value"]["mfu_pct"] / 100 * 989e12 / model.flops(c["seq"]))
    return model, plan, hardware.cluster("H100", c.get("gpus", plan.gpus)), measured


def torchtitan(row: dict[str, Any]) -> Setting | None:
    c, value = row["config"], row["value"]
    if "tokens_per_s_per_gpu" not in value and "tokens_per_s_per_gpu_vanilla_tp" not in value:
        return None
    size = next((size for size in ("405B", "70B", "8B") if size in c["model"]), None)
    if size is None:
        return None
    cluster = hardware.cluster("A100-80" if "A100" in c.get("gpu", "") else "H100", c["gpus"])
    low = c.get("float8") or "float8" in f"{c.get('opt')}{c.get('quantization')}"
    plan = Plan(c.get("seq", 8192), "fsdp", 3, data=c["fsdp"], tensor=c.get("tp", 1), context=c.get("cp", 1),
                micro_batch=c.get("local_batch", 1), checkpointing="full" if c["ac"] == "full" else "selective",
                compiled=c.get("compile", "opt" in c), precision="fp8" if low else "bf16",
                overlap_tensor=bool(c.get("async_tp")) or "asyncTP" in c.get("opt", ""))
    measured = value.get("tokens_per_s_per_gpu") or value["tokens_per_s_per_gpu_vanilla_tp"]
    return models.load(f"llama-{size.lower()}"), plan, cluster, measured


def megatron_bridge(row: dict[str, Any]) -> Setting | None:
    c = row["config"]
    name = c["system"].removeprefix("DGX-")
    precision = c.get("Precision") or "FP8"
    if not c["model"].startswith("LLAMA3") or name not in hardware.accelerators() or precision == "NVFP4":
        return None
    model = models.load("llama-" + c["model"].split("_")[1].lower())
    sharded = bool(c.get("FSDP"))
    tensor, pipeline, context = int(c["TP"]), int(c["PP"]), int(c["CP"])
    data = int(c["#-GPUs"]) // (tensor * pipeline * context)
    virtual = c["VP"]
    plan = Plan(int(c["Sequence Length"]), "fsdp" if sharded else "megatron", 3 if sharded else 1, data=data,
                tensor=tensor, pipeline=pipeline, context=context, micro_batch=int(c["MBS"]),
                accumulation=max(1, round(c["GBS"] / data / c["MBS"])), compiled=True, overlap_tensor=True,
                precision="bf16" if precision == "BF16" else "fp8",
                **({"schedule": "interleaved", "virtual": int(virtual)} if virtual not in ("n/a", 1.0) else {}))
    tokens = float(str(row["value"]["tokens_per_s_per_gpu"]).split(" ")[0])
    return model, plan, hardware.cluster(name, plan.gpus), tokens


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
}
"""By the rows' kind: what the table calls it, and how a row is read; a row that no plan can say gives None."""


def compare(triton: bool = False) -> tuple[list[Compared], list[str]]:
    """Every row of these kinds, and the names of those that no plan can express; ``triton``: see :func:`mosaic`."""
    found, left = [], []
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        if row["kind"] not in READERS:
            continue
        kind, read = READERS[row["kind"]]
        setting = mosaic(row, triton) if read is mosaic else read(row)
        if setting is None:
            left.append(row["id"])
            continue
        model, plan, cluster, measured = setting
        predicted = cost.estimate(model, plan, cluster).tokens_per_second / plan.gpus
        found.append(Compared(row["id"], kind, "tokens/s/GPU", measured, predicted))
        held = _measured_memory(row)
        if held:
            found.append(Compared(row["id"], kind + ", memory", "GiB", held,
                                  memory.estimate(model, plan).total / 2**30))
    return found, left


def _measured_memory(row: dict[str, Any]) -> float | None:
    """Peak GiB a GPU, where the row has it."""
    value = row["value"]
    if "peak_allocated_MiB" in value:
        return value["peak_allocated_MiB"] / 1024
    return value.get("memory_GiB") or value.get("memory_GB")  # nanotron's is GiB too


def _rank() -> dict[int, dict[str, float]]:
    """Bytes by kind of one rank after a warm step: states after the backward pass, the peak of activations."""
    from accelerate import PartialState

    from course_lib.runtime.meter import Meter
    from course_lib.training import zero_lab

    rank, held = PartialState(cpu=True).process_index, {}
    for stage in zero_lab.STAGES:
        engine, optimizer = zero_lab.engine_of(stage, zero_lab.small_gpt2())
        ids = zero_lab.token_ids(rank, rows=16)
        zero_lab.one_step(engine, optimizer, ids)
        module = engine.module
        with Meter(module, optimizer, getattr(engine, "resident", None)) as meter:
            engine(input_ids=ids, labels=ids).loss.backward()
        held[stage] = {**{kind: meter.resident[kind] for kind in zero_lab.STATE},
                       "activations": meter.peak["activations"]}
    return held


def on_real_ranks() -> list[Compared]:
    """A small GPT-2 in fp32 on two ranks of this machine, each stage of ZeRO: the meter beside the memory model."""
    from course_lib.runtime.launch import launch

    model = models.from_config({"model_type": "gpt2", "n_layer": 4, "n_embd": 96, "n_head": 4, "n_positions": 32,
                                "vocab_size": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    found = []
    for stage, held in launch(_rank, num_processes=2, timeout=90)[0].items():
        plan = Plan(32, "deepspeed" if stage else "ddp", stage, data=2, micro_batch=16, precision="fp32")
        formula = memory.estimate(model, plan)
        for kind, bytes_ in (("parameters", formula.parameters), ("gradients", formula.gradients),
                             ("optimizer states", formula.optimizer)):
            found.append(Compared(f"stage {stage}, {kind}", "two ranks, model states", "MiB",
                                  held[kind] / 2**20, bytes_ / 2**20))
        found.append(Compared(f"stage {stage}, activations", "two ranks, activations", "MiB",
                              held["activations"] / 2**20, (formula.activations + formula.logits) / 2**20))
    return found


def by_kind(found: list[Compared]) -> dict[str, tuple[int, float, float]]:
    """Rows, median and 90th percentile of the absolute error, by kind."""
    kinds = defaultdict(list)
    for each in found:
        kinds[each.kind].append(abs(each.error))
    return {kind: (len(errors), statistics.median(errors), sorted(errors)[math.ceil(0.9 * len(errors)) - 1])
            for kind, errors in kinds.items()}


def shares() -> dict[tuple[str, str], float]:
    """Share of peak by accelerator and data type with which the cost model gives the calibration's steps: medians."""
    found = defaultdict(list)
    for row in yaml.safe_load(CALIBRATION.read_text(encoding="utf-8")):
        plan = Plan(**{"data": row["gpus"], **row["plan"]})
        chip = hardware.accelerator(row["accelerator"])
        cluster = hardware.cluster(row["accelerator"], plan.gpus, network=row.get("network"))
        model = models.load(row["model"])
        goal = row.get("value") or row["tflops"] / model.flops(plan.sequence_length)
        low, high = 0.05, 1.0
        for _ in range(40):
            share = (low + high) / 2
            tried = replace(cluster, accelerator=replace(chip, matmul={**chip.matmul, plan.precision: share}))
            slow = cost.estimate(model, plan, tried).tokens_per_second / plan.gpus < goal
            low, high = (share, high) if slow else (low, share)
        found[row["accelerator"], plan.precision].append((low, row["id"]))
    for key, each in found.items():
        print(key, [(name, round(share, 3)) for share, name in each])
    return {key: statistics.median(share for share, _ in each) for key, each in found.items()}


def report(found: list[Compared], left: list[str]) -> Iterator[str]:
    """The page."""
    yield ("# The planner beside published measurements\n\nWritten by `python benchmarks/planner.py`. Error: predicted "
           "over measured, less one. No constant was chosen by a row of this page: shares of peak come from the steps "
           "in `course_lib/planning/catalogue/calibration.yaml`, which were written down from the publications by "
           "memory, the rest from datasheets and link benchmarks.\n\n"
           "| kind | rows | median \\|error\\| | 90th percentile |\n| --- | ---: | ---: | ---: |")
    for kind, (count, middle, high) in by_kind(found).items():
        yield f"| {kind} | {count} | {middle:.1%} | {high:.1%} |"
    for quantity in ("tokens/s/GPU", "GiB"):
        rows = [each for each in found if each.quantity == quantity]
        yield (f"| **all, {quantity}** | {len(rows)} | {statistics.median(abs(each.error) for each in rows):.1%} | "
               f"{sorted(abs(each.error) for each in rows)[math.ceil(0.9 * len(rows)) - 1]:.1%} |")
    assumed = [each for each in compare(triton=True)[0] if each.quantity == "tokens/s/GPU"]
    mosaics = [abs(each.error) for each in assumed if each.kind == "MosaicML FSDP"]
    yield ("\nWhat one assumption would change, which was thought of after a first look at the errors and which the "
           "rows do not state, so that it is not taken above: had MosaicML measured its A100 rows with the Triton "
           "kernel of the first FlashAttention (25 to 40 % of peak by arXiv 2307.08691 section 1; 32.5 % here), the "
           f"median of these rows would be {statistics.median(mosaics):.1%}, and of all tokens/s/GPU "
           f"{statistics.median(abs(each.error) for each in assumed):.1%}.\n\n"
           "The rows of torchtitan with selective checkpointing keep a list of operations that the memory model has "
           "no formula for; it counts nothing as recomputed.")
    yield "\n## Worst rows\n\n| row | quantity | measured | predicted | error |\n| --- | --- | ---: | ---: | ---: |"
    for each in sorted(found, key=lambda each: -abs(each.error))[:15]:
        yield f"| {each.row} | {each.quantity} | {each.measured:,.4g} | {each.predicted:,.4g} | {each.error:+.0%} |"
    yield (f"\n## Not compared\n\n{len(left)} rows that the planner has no words for (experts spread over ranks, "
           "NVFP4, accelerators that the catalogue lacks, sizes that the row does not give): "
           + ", ".join(left) + ".\n")
    yield "## All rows\n\n| row | quantity | measured | predicted | error |\n| --- | --- | ---: | ---: | ---: |"
    for each in found:
        yield f"| {each.row} | {each.quantity} | {each.measured:,.4g} | {each.predicted:,.4g} | {each.error:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calibrate", action="store_true")
    if parser.parse_args().calibrate:
        for (name, dtype), share in shares().items():
            print(f"{name} {dtype}: {share:.3f}")
        return
    found, left = compare()
    found += on_real_ranks()
    text = "\n".join(report(found, left)) + "\n"
    write_text(HERE / "planner.md", text)
    print(text.partition("\n## Not compared")[0])


if __name__ == "__main__":
    main()
