"""``oomwatch plan``: vLLM's own flags in, the arithmetic of its start out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from oomwatch import logs
from oomwatch.check import read_once
from oomwatch.commands import config_file_option, configuration, fail
from oomwatch.plan import gpus, report
from oomwatch.plan.memory import Device, Setup, plan
from oomwatch.plan.model import Model, ModelError, given_sizes, read_model
from oomwatch.settings import parse_size
from oomwatch.sources.vllm.meaning import release
from oomwatch.sources.vllm_command import human_int

NEWEST = "0.33.0"


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(int(value) if isinstance(value, str) and value.isdigit() else value)
        except ValueError as error:
            self.fail(f"{value} is no size: {error}. Write one such as 16GiB", param, ctx)


class _Tokens(click.ParamType[int]):
    """As vLLM reads its numbers of tokens: ``32k`` is 32,000 and ``32K`` is 32,768."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        count = human_int(str(value))
        if not count:
            self.fail(f"{value} is no number of tokens. Write one such as 32768 or 32k", param, ctx)
        return count


_SIZE = _Size()
_TOKENS = _Tokens()
_count = click.IntRange(min=1)


@click.command("plan")
@click.argument("path", metavar="[MODEL]", type=click.Path(path_type=Path), required=False)
@config_file_option
@click.option("--gpu", metavar="GPU", help="A name (H100, 'A100 80GB'), a size (79.2GiB), or indices here (0,1).")
@click.option("--held", type=_SIZE, help="What others hold on it; in place of what is read here, 0 to replace it all.")
@click.option("--vllm-version", metavar="VERSION", default=NEWEST, show_default=True, help="Rules changed over time.")
@click.option("--margin", type=_SIZE, default="1GiB", show_default=True, help="What the limits leave free.")
@click.option("--weights", type=_SIZE, help="Bytes of the weights of all ranks, in place of MODEL.")
@click.option("--kv-bytes-per-token", type=_SIZE, help="Bytes of cache for a token on one rank, in place of MODEL.")
@click.option("--dtype", metavar="TYPE", help="As vLLM's, and so are all below.")
@click.option("--quantization", "-q", metavar="METHOD")
@click.option("--tensor-parallel-size", "-tp", type=_count, default=1)
@click.option("--pipeline-parallel-size", "-pp", type=_count, default=1)
@click.option("--data-parallel-size", "-dp", type=_count, default=1)
@click.option("--kv-cache-dtype", metavar="TYPE", default="auto")
@click.option("--block-size", type=_count)
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True))
@click.option("--max-model-len", type=_TOKENS)
@click.option("--max-num-seqs", type=_count)
@click.option("--max-num-batched-tokens", type=_TOKENS)
@click.option("--enforce-eager", is_flag=True)
@click.option("--kv-cache-memory-bytes", type=_SIZE)
@click.option("--num-gpu-blocks-override", type=_count)
@click.option("--disable-hybrid-kv-cache-manager", is_flag=True)
@click.option("--no-enable-prefix-caching", is_flag=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    path: Path | None,
    config_file: Path | None,
    gpu: str | None,
    held: int | None,
    vllm_version: str,
    margin: int,
    weights: int | None,
    kv_bytes_per_token: int | None,
    dtype: str | None,
    quantization: str | None,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    kv_cache_dtype: str,
    block_size: int | None,
    gpu_memory_utilization: float | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    enforce_eager: bool,
    kv_cache_memory_bytes: int | None,
    num_gpu_blocks_override: int | None,
    disable_hybrid_kv_cache_manager: bool,
    no_enable_prefix_caching: bool,
    form: str,
) -> None:
    """Reckon before a start: does the engine fit, how many tokens does its cache hold, and what else would fit.

    MODEL is a model's folder or its config.json; weights beside it are taken by their size. Without --gpu the GPUs of
    this node are read, with what is held on them now. Every figure has an error bar, and the rule or measurement that
    it is from. Nothing is downloaded or started.

    \b
    Exit status: 0 it starts, even at the worse ends of the error bars
                 1 it does not, or the error bars leave it open
                 2 it cannot be reckoned: something is missing or wrong
    """
    version = release(vllm_version)
    if version is None:
        fail(f"--vllm-version {vllm_version} is no release of vLLM. Write one such as 0.11.2")
    setup = Setup(
        version=version,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        enable_prefix_caching=not no_enable_prefix_caching,
    )
    model = _model(path, weights, kv_bytes_per_token, dtype, quantization)
    device = _device(gpu, held or 0)
    made = plan(model, device or _of_this_node(config_file, gpu, held, setup), setup, margin=margin)
    click.echo(json.dumps(report.plain(made), indent=2) if form == "json" else report.text(made))
    sys.stdout.flush()
    status = report.EXIT_STATUS[made.starts]
    if device is None:
        # Reading GPUs may have left a thread in a driver call that never returns; nothing is left to do.
        os._exit(status)
    sys.exit(status)


def _model(
    path: Path | None, weights: int | None, per_token: int | None, dtype: str | None, quantized_by: str | None
) -> Model:
    if path is None:
        if weights is None:
            raise ModelError("give a model's folder or config.json, or its size with --weights")
        return given_sizes(weights, per_token)
    return read_model(path, dtype=dtype, quantized_by=quantized_by).with_sizes(weights, per_token)


def _device(gpu: str | None, held: int) -> Device | None:
    """The device by name or size; None where this node's GPUs are meant."""
    if gpu is None or all(part.strip().isdigit() for part in gpu.split(",")):
        return None
    return gpus.named(gpu, held)


def _of_this_node(config_file: Path | None, gpu: str | None, held: int | None, setup: Setup) -> Device:
    logs.configure("error", "console")
    snapshot = read_once(configuration(config_file, OOMWATCH_DISCOVERY__ENABLED="false"))
    device = gpus.of_node(snapshot, setup.ranks * setup.data_parallel_size, gpu.split(",") if gpu else ())
    return device if held is None else replace(device, held=held, holders=())
