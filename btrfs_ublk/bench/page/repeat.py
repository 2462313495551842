"""The commands that make such files again, as far as the files tell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from btrfs_ublk.bench.config import KEYS, configuration_of
from btrfs_ublk.bench.matrices import MATRICES
from btrfs_ublk.bench.page.inputs import DocumentData, MatrixData, Record
from btrfs_ublk.units import exact_size

_FROM_VENV = ".venv/bin/"


def command_of(data: DocumentData | MatrixData) -> tuple[str, list[str]]:
    """A line for a shell, and what it does not say."""
    if isinstance(data, MatrixData):
        return _matrix_command(data)
    if data.benchmark == "compare":
        words = _compare_words(data.document["parameters"])
        return _line(data.record, ["btrfs-ublk", *words], _json_name(data.name)), []
    return _module_command(data)


def _json_name(name: str) -> str:
    return name if name.endswith(".json") else f"{name}.json"


def _line(record: Record | None, words: Sequence[str], output: str = "") -> str:
    """In the VM where it was made there; output in a file of the name."""
    guest = None if record is None else record.get("guest")
    text = shlex.join([f"{_FROM_VENV}{words[0]}", *words[1:]])
    if guest:
        vm = ["scripts/vm"]
        if guest == "icount":
            vm.append("--icount")
        elif record is not None:
            vm += ["--cpus", str(record["cpus"])]
        text = f"{shlex.join(vm)} -- {text}"
    return f"{text} > {shlex.quote(output)}" if output else text


def _matrix_command(data: MatrixData) -> tuple[str, list[str]]:
    header = data.header
    if header is None:
        example = {key: data.rows[0][key] for key in KEYS if key in data.rows[0]}
        text = shlex.join(["bench", "run", "--json-opts", json.dumps(example)])
        return (
            f"{_FROM_VENV}btrfs-ublk {text}",
            ["The file has bare runs; this makes the first of them."],
        )
    blocks = [int(row["block"]) for row in data.rows]
    words = ["btrfs-ublk", "bench", "matrix", "--matrix", str(header["matrix"])]
    words += ["--seed", str(header["seed"]), "--front-end", str(header["front_end"])]
    words += ["--source", str(header["source"])]
    words += ["--runtime", f"{header['fio.runtime']:g}"]
    filters, remark = _filters(data, header)
    words += [word for each in filters for word in ("--filter", each)]
    least = _least_blocks(data)
    words += ["--min-repeats", str(least), "--max-repeats", str(max(blocks))]
    words += ["-o", data.name]
    return _line(data.record, words), [*remark, "The same seed gives the same order."]


def _least_blocks(data: MatrixData) -> int:
    counts: dict[object, int] = {}
    for row in data.rows:
        configuration = configuration_of(row)
        counts[configuration] = counts.get(configuration, 0) + 1
    return min(counts.values())


def _filters(data: MatrixData, header: Record) -> tuple[list[str], list[str]]:
    """Those that select the configurations that were run, where some do."""
    matrix = MATRICES[str(header["matrix"])].with_options(
        front_end=str(header["front_end"]),
        source=str(header["source"]),
        runtime_s=header["fio.runtime"],
    )
    ran = {configuration_of(row) for row in data.rows}
    if ran == set(matrix.configurations):
        return [], []
    values: dict[str, list[Any]] = {}
    for key in KEYS:
        of_all = {each.to_dict()[key] for each in matrix.configurations}
        of_these = {each.to_dict()[key] for each in ran}
        if of_these != of_all:
            values[key] = sorted(of_these, key=str)
    if values and set(matrix.selected(values)) == ran:
        return [f"{key}={each}" for key, found in values.items() for each in found], []
    total = len(matrix.configurations)
    return [], [f"{len(ran)} of the {total} configurations were run, not all."]


def _compare_words(parameters: Mapping[str, Any]) -> list[str]:
    words = ["bench", "compare"]
    comparisons = parameters["comparisons"]
    workloads = list(comparisons[0]["workloads"]) if comparisons else []
    if parameters.get("suite"):
        words += ["--suite", str(parameters["suite"])]
    elif comparisons:
        words += map(str, comparisons[0]["peers"])
        words += [word for each in workloads for word in ("--workload", str(each))]
    options = {"turns": "--turns", "runtime_s": "--runtime", "seed": "--seed"}
    for key, option in options.items():
        if parameters.get(key) is not None:
            words += [option, f"{parameters[key]:g}"]
    if parameters.get("size_bytes"):
        words += ["--size", exact_size(int(parameters["size_bytes"]))]
    scale = parameters.get("scale")
    if scale:
        words += ["--scale", f"{scale['factor']:g}"]
    if parameters.get("disk"):
        words += ["--disk", "DEVICE"]
    for key in ("queues", "depth", "hog"):
        if parameters.get(key) is not None:
            words += [f"--{key}", str(parameters[key])]
    if parameters.get("realtime"):
        words.append("--realtime")
    return [*words, "--json"]


def _module_command(data: DocumentData) -> tuple[str, list[str]]:
    """With the options of the benchmark that the document has values of."""
    module = import_module(f"btrfs_ublk.bench.{data.benchmark}")
    parameters = dict(data.document["parameters"])
    words = ["python", "-m", f"btrfs_ublk.bench.{data.benchmark}"]
    known: click.Command | None = getattr(module, "command", None)
    for option in known.params if known is not None else []:
        if option.name not in parameters or not isinstance(option, click.Option):
            continue
        words += _option_words(option, parameters.pop(option.name))
    rest = ", ".join(f"{name} = {value}" for name, value in parameters.items())
    remarks = [f"Further parameters: {rest}."] if rest else []
    remarks.append("Options that the document does not hold are left out.")
    return _line(data.record, [*words, "--json"], _json_name(data.name)), remarks


def _option_words(option: click.Option, value: Any) -> list[str]:
    if value is None or value == option.default:
        return []
    if option.is_flag:
        names = option.opts if value else option.secondary_opts
        return list(names[:1])
    values = value if isinstance(value, list) else [value]
    return [word for each in values for word in (option.opts[0], str(each))]
