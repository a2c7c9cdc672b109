"""`offsphere doctor`: does this machine train what the settings say?

    offsphere doctor                                        SimCLR as it is by default, group-norm
    offsphere doctor train_clip --config=recipe.yaml        a script with your own flags

On your model, data and settings (on the CPU, with at most 64 rows in a batch) it compares many
ranks with one process, micro-batches with the whole batch, streamed with dense losses, the loss's
products in fp32, tf32 and bf16 with float64, and a resumed run with an undisturbed one; it looks
whether batches hold every sample, and at the machine first: a machine at fault is told at once. The
exit code is 1 if something is at fault.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

from offsphere.names import unknown
from offsphere.run.config import parse
from offsphere.training.machine import Finding, environment
from offsphere.training.settings import TrainSettings, steps_of

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import torch
    from torch import Tensor

    from offsphere.run.scripts import Scripts
    from offsphere.training.experiment import Experiment, Method
    from offsphere.training.ranks import Ranks, Rows
    from offsphere.training.run import Make

ROWS = 64
RANKS = (2, 3)
STEPS = 6
LIMIT = 1e-5
"""The largest relative error of a gradient. (Augmented pictures are float32, the rest float64.)"""
SMALL = 1e-4
"""A gradient below this share of the largest one is measured against that share of it: one that is
zero in exact arithmetic has no digits of its own."""
SAFE = 1e-2
"""The largest relative error of a gradient by rounding alone: far less than a batch's own noise."""
STREAMED_SAMPLES = 50_000
"""Shards with more samples than this are not read through for a check."""
DEFAULT = ("train_simclr", "--norm=group")


def main(argv: Sequence[str], scripts: Scripts) -> None:
    """Check the machine and a script with its settings; an exit code other than 0 is raised."""
    if argv and argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        raise SystemExit(0)
    name, *flags = argv or DEFAULT
    if name not in scripts:
        print(f"offsphere doctor: error: {unknown('script', name, scripts)}", file=sys.stderr)
        raise SystemExit(2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks are forked
    script = scripts[name]()
    if script.make is None:
        trains = ", ".join(name for name in scripts if name.startswith("train_"))
        said = f"{name} trains nothing: expected one of {trains}."
        print(f"offsphere doctor: error: {said}", file=sys.stderr)
        raise SystemExit(2)
    settings = parse(script.config_class, flags)
    findings = printed(environment(settings))
    if not _faulty(findings):  # on a faulty machine the training may not even be importable
        findings += printed(examine(settings, script.make))
    verdicts = Counter(finding.verdict for finding in findings)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) + ".")
    if _faulty(findings):
        raise SystemExit(1)


def _faulty(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "FAULT" for finding in findings)


def printed(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding as soon as it is there: the verdict, what was measured, what to do."""
    width, indent, seen = shutil.get_terminal_size().columns, " " * 10, list[Finding]()
    for finding in findings:
        lines = [f"{finding.verdict:<10}{finding.check}: {finding.measured}"]
        lines += [indent + finding.remedy] if finding.remedy else []
        for line in lines:
            # No name is broken, however long: it is there to be copied.
            print(fill(line, width, subsequent_indent=indent, break_long_words=False,
                       break_on_hyphens=False), flush=True)  # fmt: skip
        seen.append(finding)
    return seen


def examine(settings: TrainSettings, make: Make) -> Iterator[Finding]:
    """The checks of what a script trains with these settings, one after the other."""
    import torch

    from offsphere.run.record import RunFolder

    torch.set_num_threads(1)
    settings = replace(
        settings, batch_size=min(settings.batch_size, ROWS), microbatch=None, threads=1, workers=0,
        devices=1, nodes=1, device="cpu", precision="32-true", samples=STEPS * ROWS, epochs=None,
        eval_every=0, keep="last", checkpoint_every=STEPS // 2, log_every=1, loggers=(),
        progress=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        experiment = make(settings, RunFolder(folder), None)
        steps_of(settings, experiment.population)
        experiment.build()
        yield from _examined(experiment, settings)


def _examined(experiment: Experiment, settings: TrainSettings) -> Iterator[Finding]:
    from torch.utils.data import Dataset

    method, batches, population = experiment.method, experiment.batches, experiment.population
    if isinstance(batches, Dataset):
        yield shares(batches, settings)
        yield epochs(settings, population)
        batch = batches[0]
    else:
        yield streamed_epochs(batches, settings, population)
        batch = next(iter(batches.from_step(0, 1)))
    yield from many_ranks(method, batch, settings)
    yield micro_batches(method, batch, settings)
    yield streamed_losses(method, batch)
    yield rounded_losses(method, batch, settings)
    if isinstance(batches, Dataset):
        yield resumed(experiment, settings)


def shares(batches: Any, settings: TrainSettings) -> Finding:
    """Whether the rows that ranks load are, together, the batch."""
    import torch

    from offsphere.training.loop import own_part
    from offsphere.training.ranks import share

    missing = 0
    for step in range(2):
        whole = _tensors(own_part(batches, step, share(settings.batch_size, 0, 1)))
        for count in RANKS:
            every = (share(settings.batch_size, rank, count) for rank in range(count))
            parts = [_tensors(own_part(batches, step, rows)) for rows in every]
            for name, x in whole.items():
                joined = torch.cat([part[name] for part in parts])
                missing += abs(len(x) - len(joined))
                missing += int(len(x) == len(joined) and not torch.equal(x, joined))
    verdict = "FAULT" if missing else "ok"
    measured = f"{missing} rows missing, repeated or changed on {RANKS[0]} and {RANKS[1]} ranks"
    return Finding("rows of all ranks", measured, verdict, _report(missing))


def epochs(settings: TrainSettings, population: int) -> Finding:
    """Whether each of two epochs holds every sample once."""
    import torch

    from offsphere.training.streams import batch_indices

    size = settings.batch_size
    steps = -(-2 * population // size)
    drawn = [batch_indices(settings.seed, step, size, population) for step in range(steps)]
    order = torch.cat(drawn)[: 2 * population].view(2, population).sort(1).values
    wrong = int((order != torch.arange(population)).sum())
    measured = f"{wrong} of {population} samples not once in an epoch"
    return Finding("samples of an epoch", measured, "FAULT" if wrong else "ok", _report(wrong))


def streamed_epochs(batches: Any, settings: TrainSettings, population: int) -> Finding:
    """Whether the second epoch's worth of samples is the first one's in another order."""
    if population > STREAMED_SAMPLES:
        measured = f"not read: {population} samples are more than {STREAMED_SAMPLES}"
        return Finding("samples of an epoch", measured, "ok")
    steps = -(-2 * population // settings.batch_size)
    rows = [
        row.numpy().tobytes()
        for batch in batches.from_step(0, steps)
        for row in next(iter(_tensors(batch).values()))
    ]
    first, second = Counter(rows[:population]), Counter(rows[population : 2 * population])
    wrong = ((first - second) + (second - first)).total()
    measured = f"{wrong} of {population} samples not as often in one epoch as in the next"
    remedy = "the shards changed while they were read: make them again with offsphere shards make"
    remedy = remedy if wrong else ""
    return Finding("samples of an epoch", measured, "FAULT" if wrong else "ok", remedy)


def many_ranks(method: Method, batch: Any, settings: TrainSettings) -> Iterator[Finding]:
    """The gradients of two steps on gloo ranks, forked from here, against this process."""
    expected = None
    for count in RANKS:
        check = f"{count} ranks against one process"
        if refusal := _refusal(method, settings, count):
            yield refusal._replace(check=check)
            continue
        found = on_ranks(count, lambda ranks: gradients(method, batch, settings, ranks))
        if expected is None:
            expected = gradients(method, batch, settings, None)
        yield _compared(check, found, expected)


def micro_batches(method: Method, batch: Any, settings: TrainSettings) -> Finding:
    """The gradients of a batch that passes the towers in parts against those of the whole."""
    size = max(1, settings.batch_size // 8)
    check = f"micro-batches of {size} against {settings.batch_size}"
    parts = replace(settings, microbatch=size)
    if refusal := _refusal(method, parts, 1):
        return refusal._replace(check=check)
    from offsphere.training.ranks import here

    found = gradients(method, batch, parts, here(parts))
    return _compared(check, found, gradients(method, batch, settings, None))


def gradients(
    method: Method, batch: Any, settings: TrainSettings, ranks: Ranks | None
) -> dict[str, Tensor]:
    """Every gradient of the second of two steps, and the buffers after it, in float64."""
    import torch

    from offsphere.training import microbatch
    from offsphere.training.ranks import share, take
    from offsphere.training.streams import stream_seed

    method = in_double(method)
    for dropout in method.modules():  # its masks depend on how a batch is divided
        if isinstance(dropout, torch.nn.modules.dropout._DropoutNd):
            dropout.eval()
    for step in range(2):
        method.zero_grad()
        if ranks is None:
            torch.manual_seed(stream_seed(settings.seed, "model", step))
            method(batch, step).losses["loss"].backward()
        else:
            size = settings.batch_size
            own = take(batch, ranks.own(size), share(size, 0, 1))
            microbatch.split_step(method, own, step, settings, ranks)
        method.after_step(0.5)
    found = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    return {name: x.detach().clone() for name, x in (found | dict(method.named_buffers())).items()}


def in_double(method: Method) -> Method:
    """A copy in float64, where rounding cannot be taken for a fault nor hide one."""
    import torch

    twin = copy.deepcopy(method).double()
    inputs = twin.inputs

    def doubled(batch: Any, step: int, rows: Rows | None = None) -> dict[str, Tensor]:
        found = inputs(batch, step) if rows is None else inputs(batch, step, rows)
        return _as(torch.float64, found)

    twin.inputs = doubled
    return twin


def _as(dtype: torch.dtype, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole numbers stay what they are."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def streamed_losses(method: Method, batch: Any) -> Finding:
    """The losses' gradients in tiles against those from the whole score matrix."""
    from offsphere import streamed

    method = in_double(method)
    embedded, constants = _embedded(method, batch)
    found = []
    dense = streamed.DENSE_SCORES
    for limit in (0, sys.maxsize):
        twin = copy.deepcopy(method)
        try:
            streamed.DENSE_SCORES = limit
            rows = _of_rows(twin, embedded, constants)
        finally:
            streamed.DENSE_SCORES = dense
        parameters = {name: p.grad for name, p in twin.named_parameters()}
        found.append(rows | {name: x for name, x in parameters.items() if x is not None})
    return _compared("streamed against dense losses", *found)


def rounded_losses(method: Method, batch: Any, settings: TrainSettings) -> Finding:
    """What the loss's products in fp32, tf32 and bf16 do to the gradients of these embeddings."""
    errors = gradient_errors(method, batch)
    safe = [name for name, error in errors.items() if error <= SAFE]
    every = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    measured = (
        f"gradients off by {every} at temperature {settings.temperature:g}; safe: "
        f"{', '.join(safe) or 'none'}"
    )
    remedy = "--loss-precision=fp32 on a GPU" if "fp32" in safe else "a higher --temperature"
    good = settings.loss_precision in safe
    check = f"loss in {settings.loss_precision}"
    return Finding(check, measured, "ok" if good else "warning", "" if good else remedy)


def gradient_errors(method: Method, batch: Any) -> dict[str, float]:
    """The relative error of the embeddings' gradients against float64, by precision."""
    import torch

    from offsphere.training.rounding import Rounded

    method = in_double(method)
    embedded, constants = _embedded(method, batch)
    method.losses(embedded | constants)  # a scale is calibrated once, for all
    single = copy.deepcopy(method).float()
    rows, fixed = (_as(torch.float32, part) for part in (embedded, constants))
    # The same numbers for both, so that only what the loss does with them is compared.
    expected = _of_rows(method, _as(torch.float64, rows), _as(torch.float64, fixed))
    modes = {
        "fp32": contextlib.nullcontext(),
        "tf32": Rounded(10),
        "bf16": Rounded(7, results=True),
    }
    errors = {}
    for name, mode in modes.items():
        with mode:
            errors[name] = worst_error(_of_rows(single, rows, fixed), expected)[1]
    return errors


def _embedded(method: Method, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the towers make of a batch, and what else the loss is told."""
    import torch

    with torch.no_grad():
        inputs = method.inputs(batch, 0)
        return method.embed(inputs), method.constants(inputs, 0)


def _of_rows(
    method: Method, embedded: dict[str, Tensor], constants: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients of the embeddings; those of parameters are added to them."""
    leaves = {name: x.clone().requires_grad_() for name, x in embedded.items()}
    method.losses(leaves | constants)["loss"].backward()
    grads = {f"embedding {name}": x.grad for name, x in leaves.items()}
    return {name: x for name, x in grads.items() if x is not None}


def resumed(experiment: Experiment, settings: TrainSettings) -> Finding:
    """A run that is cut in the middle and resumes against one that is not."""
    from offsphere.run.record import open_run
    from offsphere.training.loop import fit

    def train(method: Method, out: str, *, cut: bool = False) -> None:
        trial = _trial(experiment, method, cut=cut)
        with open_run(settings, script="doctor", out=out) as folder:
            fit(trial, settings, folder)

    settings = replace(settings, samples=STEPS * settings.batch_size)
    whole, cut, again = (copy.deepcopy(experiment.method) for _ in range(3))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        train(whole, one)
        with contextlib.suppress(OSError):
            train(cut, other, cut=True)
        train(again, other)
    expected, found = (dict(x.named_parameters()) | dict(x.named_buffers()) for x in (whole, again))
    differ = [name for name, x in expected.items() if not _same(x, found[name])]
    saved = whole.state_dict()
    differ.sort(key=lambda name: name in saved)  # what was not saved is the cause of the rest
    if not differ:
        return Finding("resumed against undisturbed", f"{len(expected)} tensors equal", "ok")
    first = differ[0]
    remedy = f"save {first} in the state dict" if first not in saved else _report(1)
    measured = f"{len(differ)} of {len(expected)} tensors differ, first {first}"
    return Finding("resumed against undisturbed", measured, "FAULT", remedy)


def _trial(experiment: Experiment, method: Method, *, cut: bool) -> Experiment:
    """The experiment with a method of its own, unmeasured; cut, its batches end in the middle."""
    from torch.utils.data import Dataset

    from offsphere.training.experiment import Experiment

    class Cut(Dataset):
        def __getitem__(self, step: int) -> Any:
            if step > STEPS // 2:
                raise OSError("cut by the doctor")
            return experiment.batches[step]  # pyright: ignore

    trial = Experiment()
    trial.method, trial.population = method, experiment.population
    trial.batches = Cut() if cut else experiment.batches
    return trial


def on_ranks(count: int, work: Callable[[Ranks], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The first rank's result of work that `count` forked processes do together over gloo."""
    import multiprocessing

    import torch
    import torch.distributed as dist

    from offsphere.training.ranks import Ranks

    def process(rank: int, folder: str) -> None:
        store = dist.FileStore(f"{folder}/store", count)  # no port that another could take
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        found = work(Ranks(torch.device("cpu")))
        if rank == 0:
            torch.save(found, f"{folder}/found")
        dist.destroy_process_group()

    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=process, args=(rank, folder)) for rank in range(count)]
        for one in ranks:
            one.start()
        codes = _codes_at_the_end(ranks)
        if any(codes):
            raise OSError(
                f"{count} gloo ranks on this machine ended with the exit codes {codes}: see above, "
                "and let processes of this machine talk over 127.0.0.1."
            )
        return torch.load(f"{folder}/found")


def _codes_at_the_end(processes: Sequence[BaseProcess]) -> list[int | None]:
    """The exit codes of processes that work together: if one fails, the others are ended too."""
    from multiprocessing.connection import wait

    working = list(processes)
    while working:
        wait([process.sentinel for process in working])
        working = [process for process in working if process.exitcode is None]
        if any(process.exitcode for process in processes):
            for process in working:
                process.terminate()
    return [process.exitcode for process in processes]


def _compared(check: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> Finding:
    if found.keys() != expected.keys():
        name = sorted(found.keys() ^ expected.keys())[0]
        return Finding(check, f"{name} has a gradient on one side only", "FAULT", _report(1))
    name, error = worst_error(found, expected)
    measured = f"{error:.1e} of {name}" if error else "equal to the last bit"
    good = error <= LIMIT
    return Finding(check, measured, "ok" if good else "FAULT", _report(not good))


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """The tensor with the largest relative error, and that error."""
    finite = (x.double().norm().item() for x in expected.values() if x.isfinite().all())
    largest = max(finite, default=0.0)
    errors = {name: _error(found[name], x, SMALL * largest) for name, x in expected.items()}
    return max(errors.items(), key=lambda item: item[1])


def _error(found: Tensor, expected: Tensor, least: float) -> float:
    """The relative error, or that against `least` if this is larger; NaN is never right."""
    if bool((found == expected).all()):
        return 0.0
    x, y = found.double(), expected.double()
    error = ((x - y).norm() / max(y.norm().item(), least)).item()
    return error if error == error else float("inf")


def _same(one: Tensor, other: Tensor) -> bool:
    import torch

    return one.shape == other.shape and bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())


def _refusal(method: Method, settings: TrainSettings, count: int) -> Finding | None:
    """What is not offered for these towers, with its remedy."""
    import torch

    from offsphere.training.microbatch import prepare_batch_norm
    from offsphere.training.ranks import Ranks

    ranks = Ranks(torch.device("cpu"))
    ranks.count = count
    try:
        prepare_batch_norm(method, settings, ranks)
    except ValueError as refusal:
        return Finding("", "not offered with batch-norm", "refused", str(refusal))
    return None


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name."""
    if isinstance(batch, dict):
        return batch
    return batch._asdict() if isinstance(batch, tuple) else {"batch": batch}  # pyright: ignore


def _report(wrong: float) -> str:
    return "do not trust runs of this kind; report it with this table" if wrong else ""
