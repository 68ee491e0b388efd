"""Where a run writes, what earlier runs left there, and what it reads."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoint import in_use
from mindspeed_llm.checkpoint.durable import sync_path
from mindspeed_llm.checkpoint.folders import latest_iteration
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.processes import started, system
from mindspeed_llm.tools.doctor.finding import (
    Check,
    Finding,
    Surroundings,
    nearest_folder,
    note,
    ok,
    problem,
    warning,
)

GIB = 1 << 30
FAILURES = "failure.json"
"""As ``training/failure.py`` names and writes it; importing that needs torch."""
_TRIAL_BYTES = 4 << 20
_LITTLE, _SCARCE = GIB, 20 * GIB
"""Free bytes below which a save of any model fails, and of a small one with its optimizer."""
_INODES = 1000
_SLOW_SECONDS = 1.0
_CLOCK_SECONDS = 5.0


def save_folder(s: Surroundings) -> Iterator[Finding]:
    """That files and folders can be written to --save, made durable, renamed, linked and locked."""
    if s.save is None:
        yield ok("no --save was given: storage was not tried")
        return
    if s.save.exists() and not s.save.is_dir():
        yield problem(f"--save {s.save} is a file", "a run saves into a folder", "another --save")
        return
    base = nearest_folder(s.save)
    try:
        trial = Path(tempfile.mkdtemp(prefix=".doctor.", dir=base))
    except OSError as error:
        yield problem(
            f"--save {s.save}: {base} cannot be written to ({error.strerror})",
            "the run is refused, or fails at its first save",
            f"another --save, or chown {os.getuid()} {base}",
        )
        return
    try:
        yield from _tried(trial, s.save)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _tried(trial: Path, save: Path) -> Iterator[Finding]:
    clean = True
    begun = time.monotonic()
    for act, say, why, remedy in _TRIALS:
        try:
            act(trial)
        except OSError as error:
            clean = False
            yield say(f"--save {save}: {act.__name__.strip('_')} fails: {error.strerror}", why, remedy)
            if say is problem:
                return
    seconds = time.monotonic() - begun
    if seconds > _SLOW_SECONDS:
        yield note(
            f"--save {save}: {_TRIAL_BYTES >> 20} MiB and a few files took {seconds:.1f} s to be durable",
            "training waits for saves",
            "--async-save",
        )
    elif clean:
        yield ok(f"--save {save}: written, synced, renamed, linked and locked in {1000 * seconds:.0f} ms")
    behind = (trial / "file").stat().st_mtime - time.time()
    if abs(behind) > _CLOCK_SECONDS:
        yield warning(
            f"--save {save}: its server's clock differs from this node's by {behind:+.0f} s",
            "times of files mislead whoever compares them",
            "timedatectl set-ntp true, on both",
        )


def _write(trial: Path) -> None:
    with (trial / "file").open("wb") as file:
        file.write(os.urandom(_TRIAL_BYTES))


def _fsync(trial: Path) -> None:
    sync_path(trial / "file")
    sync_path(trial)


def _rename(trial: Path) -> None:
    for name, text in (("new", "new"), ("old", "old")):
        (trial / name).write_text(text)
    os.replace(trial / "new", trial / "old")
    (trial / "draft").mkdir()
    (trial / "draft").rename(trial / "whole")
    if (trial / "old").read_text() != "new" or not (trial / "whole").is_dir():
        raise OSError(0, "the old content is still there")


def _link(trial: Path) -> None:
    os.link(trial / "file", trial / "second")


def _lock(trial: Path) -> None:
    with (trial / "file").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_TRIALS: tuple[tuple[Callable[[Path], None], Callable[..., Finding], str, str], ...] = (
    (_write, problem, "a save fails", "free space, quota and ulimit -f; or another --save"),
    (_fsync, problem, "a save waits until its files are on the disk, and fails", "another file system for --save"),
    (_rename, problem, "a save becomes visible by a rename", "another file system for --save"),
    (_link, note, "the mark against a second run is made another way", "nothing to do"),
    (
        _lock,
        warning,
        "two processes that prepare the same data do not see each other; lines of failure.json may mix",
        "mount with locks: without nolock (NFS), with flock (Lustre)",
    ),
)


def free_space(s: Surroundings) -> Iterator[Finding]:
    """Bytes and files that --save has room for."""
    if s.save is None:
        return
    base = nearest_folder(s.save)
    free, seen = shutil.disk_usage(base).free, os.statvfs(base)
    what = f"{free / GIB:.1f} GiB are free for --save {s.save}"
    if seen.f_files and seen.f_favail < _INODES:
        yield problem(f"{seen.f_favail} more files fit at {base}", "a save fails: No space left", "delete small files")
    if free < _SCARCE:
        yield (problem if free < _LITTLE else warning)(
            what,
            "a save with Adam's state in fp32 takes 14 to 18 bytes a parameter, and the one before stays until it is"
            " whole",
            "another --save, --save-total-limit N, --no-save-optim",
        )
    else:
        yield ok(what)


def file_system(s: Surroundings) -> Iterator[Finding]:
    """What kind of file system --save is on."""
    if s.save is None:
        return
    base = nearest_folder(s.save)
    mounts = [line.split() for line in (s.root / "proc/mounts").read_text().splitlines()]
    here = [words for words in mounts if base.is_relative_to(words[1].replace("\\040", " "))]
    if not here:
        return
    device, point, kind, options = max(enumerate(here), key=lambda item: (len(item[1][1]), item[0]))[1][:4]
    what = f"--save {s.save} is on {kind} ({device} at {point})"
    loose = [option for option in options.split(",") if option in ("nolock", "soft", "local_lock=all")]
    if kind in ("tmpfs", "ramfs"):
        yield warning(what, "memory: what is saved is gone with the machine", "another --save")
    elif kind == "overlay":
        yield warning(what, "the container's own layer: what is saved goes with the container", "mount a volume there")
    elif kind.startswith("nfs") and loose:
        yield warning(
            f"{what}, mounted with {','.join(loose)}",
            "errors of the server reach a save as damage, or processes do not see each other's locks",
            "mount it hard and with locks",
        )
    else:
        yield ok(what)


def leftovers(s: Surroundings) -> Iterator[Finding]:
    """What other runs left in --save."""
    if s.save is None or not s.save.is_dir():
        return
    try:
        newest = latest_iteration(s.save)
        yield ok(f"--save {s.save} holds {f'the save of iteration {newest}' if newest is not None else 'no save'}")
    except CheckpointError as error:
        yield problem(error.what, "a resume is refused", error.fix or "give --ckpt-step")
    mark = _json(s.save / in_use.NAME)
    if mark is not None:
        yield _mark_of(mark, s.save)
    cut_off = sorted(path.name for kind in ("tmp", "removed") for path in s.save.glob(f"iter_*.{kind}"))
    if cut_off:
        yield note(
            f"saves that were cut off: {', '.join(cut_off)}", "never read", "nothing: the next save deletes them"
        )
    last = _last_failure(s.save / FAILURES)
    if last is not None:
        yield note(
            f"the last failure: {last['time']} rank {last['rank']} on {last['host']}, step {last['step']},"
            f" {last['phase']}: {last['cause']}",
            f"of {FAILURES} of an earlier run",
            "nothing, if that is known",
        )


def _mark_of(mark: dict[str, Any], save: Path) -> Finding:
    run = f"process {mark['pid']} on {mark['host']}, since {mark['since']}"
    if mark["system"] is None or mark["system"] != system():
        return note(
            f"--save {save} is marked by {run}",
            "a run watches for a minute whether that one still lives, and is then refused or goes on",
            "nothing, or end that run",
        )
    if mark["start"] == started(mark["pid"]):
        return problem(f"--save {save} is written to by {run}", "a second run is refused", "another --save, or wait")
    return note(f"--save {save} bears the mark of {run}, which is gone", "it does not count", "nothing")


def _last_failure(path: Path) -> dict[str, Any] | None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return json.loads(lines[-1]) if lines else None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def training_data(s: Surroundings) -> Iterator[Finding]:
    """That each word of --data-path is a prepared dataset, or raw data."""
    for word in s.data:
        if word.replace(".", "", 1).isdecimal() and not Path(word).exists():
            continue
        prefix = word.removesuffix(".bin").removesuffix(".idx")
        index, body = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        unreadable = [str(path) for path in (index, body, Path(word)) if path.exists() and not os.access(path, os.R_OK)]
        if unreadable:
            yield problem(f"{', '.join(unreadable)} may not be read", "the run fails", f"chmod a+r {unreadable[0]}")
        elif index.is_file() and body.is_file():
            yield ok(f"{prefix}: a prepared dataset of {body.stat().st_size / GIB:.2f} GiB")
        elif index.is_file() or body.is_file():
            yield problem(
                f"{prefix} has only one of .idx and .bin", "a dataset is both", "prepare it again: preprocess_data.py"
            )
        elif Path(word).exists():
            yield ok(f"{word}: raw data, prepared at the start")
        else:
            near = sorted(path.with_suffix("").name for path in nearest_folder(Path(word).parent).glob("*.idx"))
            yield problem(
                f"--data-path {word} is neither a prefix of .bin and .idx nor raw data",
                "the run is refused",
                f"the prefix ends with _text_document; there are: {', '.join(near[:8]) or 'none'}",
            )


CHECKS: tuple[Check, ...] = (save_folder, free_space, file_system, leftovers, training_data)
