"""Prepared datasets joined: the shards of one preparation, or any that share a tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mindspeed_llm.data.bad_rows import SKIP, BadRows, bad_rows_path, read_bad_rows
from mindspeed_llm.data.indexed import IndexedWriter, IndexSummary, bin_path, idx_path, read_index
from mindspeed_llm.data.manifest import Manifest, commit_dataset, manifest_path, read_manifest, shard_prefix
from mindspeed_llm.data.prepare import PrepareResult, make_parent
from mindspeed_llm.errors import DataError

_SETTINGS = (
    *("sources", "tokenizer_hash", "append_eod", "pad_to_multiple_of"),
    *("split_sentences", "keep_newlines", "lang"),
)
_SHARD = re.compile(r"\.shard-(?P<number>\d+)-of-(?P<count>\d+)")


def merge_datasets(parts: Sequence[str], target: str) -> IndexSummary:
    """Lay datasets end to end. Where all have manifests, so has the result.

    Args:
        parts: prefixes, in order.
        target: prefix of the result.

    Returns:
        The index of the result.

    Raises:
        DataError: a part is missing or damaged, or the parts differ in tokenizer, dtype or kind of document.
    """
    manifests = [read_manifest(part) for part in parts]
    known = [manifest for manifest in manifests if manifest is not None]
    for part, manifest in zip(parts, manifests, strict=True):
        if manifest is not None and manifest.tokenizer_hash != known[0].tokenizer_hash:
            raise DataError(
                "Datasets of different tokenizers cannot be merged.",
                got=f"{part}: {manifest.tokenizer}",
                allowed=known[0].tokenizer,
                fix="prepare them with the same tokenizer",
            )
    indices = [read_index(part) for part in parts]
    split = any(len(index.boundaries) != len(index.lengths) + 1 for index in indices)
    with IndexedWriter(target, np.dtype(indices[0].dtype), split=split) as writer:
        for part in parts:
            writer.add_dataset(part)
        merged = None
        if len(known) == len(parts):
            merged = replace(
                known[0],
                documents=writer.documents,
                tokens=writer.tokens,
                text_bytes=sum(manifest.text_bytes for manifest in known),
                bad_rows=sum(manifest.bad_rows for manifest in known),
                append_eod=all(manifest.append_eod for manifest in known),
                sources=tuple(dict.fromkeys(source for manifest in known for source in manifest.sources)),
                shard=None,
            )
        commit_dataset(writer, merged)
    return read_index(target)


def merge_shards(output_prefix: str) -> PrepareResult:
    """Join what preparations with ``--shard 0/n`` to ``--shard n-1/n`` wrote, and remove the parts.

    The result is, byte for byte, that of a preparation without shards.

    Args:
        output_prefix: as it was given to each of them.

    Raises:
        DataError: there are no shards, or some are missing, or they do not belong together.
    """
    shards = _find_shards(output_prefix)
    ordered = [shards[shard] for shard in sorted(shards)]
    prefixes = [shard_prefix(output_prefix, shard) for shard in sorted(shards)]
    names = sorted({name for parts in ordered for name in parts})
    for prefix, parts in zip(prefixes, ordered, strict=True):
        if missing := [name for name in names if name not in parts]:
            raise DataError("A shard is incomplete.", got=f"no {prefix}{missing[0]}", fix="prepare this shard again")
    firsts = {name: _check_settings([parts[name] for parts in ordered]) for name in names}
    indices: dict[str, IndexSummary] = {}
    with BadRows(output_prefix, SKIP) as bad_rows:
        for prefix in prefixes:
            bad_rows.add(read_bad_rows(prefix))
        for name in names:
            indices[name] = merge_datasets([parts[name] for parts in ordered], f"{output_prefix}{name}")
        path = bad_rows.commit()
    for prefix, parts in zip(prefixes, ordered, strict=True):
        bad_rows_path(prefix).unlink(missing_ok=True)
        for part in parts.values():
            for leftover in (idx_path(part), bin_path(part), manifest_path(part)):
                leftover.unlink()
    keys = {firsts[name].key: name for name in names}
    merged = {key: read_manifest(f"{output_prefix}{name}") for key, name in keys.items()}
    return PrepareResult(
        prefixes={key: f"{output_prefix}{name}" for key, name in keys.items()},
        documents=len(indices[names[0]].boundaries) - 1,
        tokens={key: indices[name].tokens for key, name in keys.items()},
        text_bytes={key: manifest.text_bytes for key, manifest in merged.items() if manifest is not None},
        bad_rows=bad_rows.count,
        bad_rows_path=str(path) if path else None,
        bad_reasons=dict(bad_rows.reasons),
    )


def _find_shards(output_prefix: str) -> dict[tuple[int, int], dict[str, str]]:
    """(number, count) -> what follows the shard's prefix in the name of a dataset -> prefix of that dataset."""
    folder, base = os.path.split(output_prefix)  # of "dir/" the name is empty
    shards: dict[tuple[int, int], dict[str, str]] = {}
    for index in sorted(Path(folder).glob("*.idx")):
        found = _SHARD.match(index.name, len(base))
        if found is None or not index.name.startswith(base):
            continue
        shard = int(found["number"]), int(found["count"])
        shards.setdefault(shard, {})[index.name[found.end() : -len(".idx")]] = str(index.with_suffix(""))
    counts = {count for _, count in shards}
    if len(counts) != 1:
        raise DataError(
            "There must be the shards of one preparation.",
            got=f"{sorted(counts)} shards" if counts else f"no {output_prefix}.shard-*.idx",
            fix="--shard 0/N to --shard N-1/N with this --output-prefix; remove shards of other counts",
        )
    count = counts.pop()
    if missing := [number for number in range(count) if (number, count) not in shards]:
        raise DataError(
            "Shards are missing.",
            got=", ".join(f"{number}/{count}" for number in missing[:10]),
            fix="prepare these with --shard; of a merge that was stopped while it removed its parts the result is "
            "whole, and the parts that are left can be removed",
        )
    return shards


def _check_settings(parts: Sequence[str]) -> Manifest:
    """Refuse shards that were prepared from other inputs or in another way than the first; returns its manifest."""
    first = _manifest(parts[0])
    for part in parts:
        manifest = _manifest(part)
        for name in _SETTINGS:
            if getattr(manifest, name) != getattr(first, name):
                raise DataError(
                    "Shards were prepared in different ways.",
                    got=f"{name} of {part}",
                    allowed=f"that of {parts[0]}",
                    fix="prepare all shards with the same inputs and settings",
                )
    return first


def _manifest(part: str) -> Manifest:
    manifest = read_manifest(part)
    if manifest is None:
        raise DataError("A shard has no manifest.", got=part, fix="prepare this shard again")
    return manifest


def merge_groups(folder: str, groups: Sequence[str], output_prefix: str) -> dict[str, IndexSummary]:
    """Join, for each group, the datasets in ``folder`` whose names contain it, in the order of their names.

    Returns:
        ``<output_prefix>_<group>`` -> the index of it.

    Raises:
        DataError: nothing matches, or see :func:`merge_datasets`.
    """
    if not Path(folder).is_dir():
        raise DataError("What is merged must be a folder of datasets.", got=folder, fix="--input FOLDER")
    targets = {f"{output_prefix}_{group}": group for group in groups}
    # What an earlier merge wrote into the folder is no part of this one, however its path is spelt.
    own = {idx_path(target).resolve() for target in targets}
    indices = [path for path in sorted(Path(folder).glob("*.idx")) if path.resolve() not in own]
    parts = {
        target: [str(path.with_suffix("")) for path in indices if group in path.stem]
        for target, group in targets.items()
    }
    for target, group in targets.items():
        if not parts[target]:
            raise DataError(
                "No dataset of the folder belongs to the group.", got=f"{group!r} in {folder}",
                fix="--merge-group-keys, each a part of the names of .idx files",
            )  # fmt: skip
    make_parent(output_prefix)
    return {target: merge_datasets(found, target) for target, found in parts.items()}
