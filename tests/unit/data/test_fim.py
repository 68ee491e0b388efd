"""Fill in the middle: nothing lost, the layouts, the shares, and samples that depend on their number alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.data.batches import build_data_iterator
from mindspeed_llm.data.datasets import build_datasets
from mindspeed_llm.data.fim import FillInTheMiddle, Sentinels, build_fim, sample_random
from mindspeed_llm.data.sampler import DataParallelCut
from mindspeed_llm.data.tokenizer import NullTokenizer, Tokenizer, load_tokenizer
from mindspeed_llm.data.tokenizer.fast import FastTokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import TOKENIZER, run_config, write_documents

MARKS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
#: Characters that take one, two, three and four bytes.
TEXT = "def area(r):\n    return 3.14 * r ** 2  # für Kreise, 圆的面积 🙂\n"
Make = Callable[..., FillInTheMiddle]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    """The tokenizer of the quick start with the four marks."""
    folder = tmp_path_factory.mktemp("tokenizer")
    parts = json.loads((TOKENIZER / "tokenizer.json").read_text())
    last = parts["added_tokens"][-1]
    parts["added_tokens"] += [
        {**last, "id": last["id"] + 1 + number, "content": mark, "special": False} for number, mark in enumerate(MARKS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    (folder / "tokenizer_config.json").write_text((TOKENIZER / "tokenizer_config.json").read_text())
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FastTokenizer)
    return loaded


@pytest.fixture
def make(tokenizer: FastTokenizer) -> Make:
    def build(**values: Any) -> FillInTheMiddle:
        given = {"fim_rate": 1.0, **values}
        fim = build_fim(DataConfig(fim_data=True, **given), tokenizer)
        assert fim is not None
        return fim

    return build


def encode(fim: FillInTheMiddle, *texts: str) -> np.ndarray:
    """Documents end to end, each with its end."""
    ids = [[*fim.tokenizer.encode(text), fim.sentinels.eod] for text in texts]
    return np.array([token for document in ids for token in document], dtype=np.int64)


def parts_of(fim: FillInTheMiddle, ids: np.ndarray) -> tuple[str, str, str, str]:
    """The order of a rearranged document, and what was before, in and after its middle.

    With nothing before the middle both orders read the same, as SPM.
    """
    mark, backend = fim.sentinels, fim.tokenizer.backend
    places = {name: int(np.flatnonzero(ids == getattr(mark, name))[0]) for name in ("prefix", "middle", "suffix")}
    assert places["prefix"] == 0
    assert places["suffix"] < places["middle"]
    between = ids[places["suffix"] + 1 : places["middle"]].tolist()
    behind = backend.decode(ids[places["middle"] + 1 :].tolist())
    if places["suffix"] == 1:
        return "SPM", "", behind, backend.decode(between)
    return "PSM", backend.decode(ids[1 : places["suffix"]].tolist()), behind, backend.decode(between)


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "PSM"), (1.0, "SPM")])
def test_no_character_is_lost(make: Make, spm_rate: float, order: str) -> None:
    fim = make(fim_spm_rate=spm_rate, fim_no_prefix="STAY")
    # What is cut off is of the last document, which stays as it is.
    sample = encode(fim, TEXT, TEXT[::-1], "STAY" + TEXT)
    seen: set[tuple[str, str]] = set()
    for seed in range(200):
        result = fim(sample, np.random.RandomState(seed))
        assert result.dtype == np.int64
        assert len(result) == len(sample)
        ends = np.flatnonzero(result == fim.sentinels.eod)
        for text, document in ((TEXT, result[: ends[0]]), (TEXT[::-1], result[ends[0] + 1 : ends[1]])):
            found, before, middle, after = parts_of(fim, document)
            assert found == order or not before
            assert before + middle + after == text
            seen.add((before, after))
        rest = result[ends[1] + 1 :]
        assert np.array_equal(rest, encode(fim, "STAY" + TEXT)[: len(rest)])
    assert len(seen) > 80


def test_a_document_in_closed_form(make: Make) -> None:
    """The draws, in their order: whether, where twice, which order."""
    fim = make(fim_rate=0.7, fim_spm_rate=0.4)
    mark = fim.sentinels
    sample = np.concatenate([encode(fim, TEXT), np.full(8, 5)])
    kinds = set()
    for seed in range(100):
        random = np.random.RandomState(seed)
        expected = sample[:-9].tolist()
        if random.binomial(1, 0.7):
            first, second = np.sort(random.randint(0, len(TEXT) + 1, size=2))
            before, middle, after = map(fim.tokenizer.encode, (TEXT[:first], TEXT[first:second], TEXT[second:]))
            spm = bool(random.binomial(1, 0.4))
            kinds.add(spm)
            expected = (
                [mark.prefix, mark.suffix, *after, mark.middle, *before, *middle]
                if spm
                else [mark.prefix, *before, mark.suffix, *after, mark.middle, *middle]
            )
        else:
            kinds.add(None)
        cut = min(len(expected), len(sample))
        assert fim(sample, np.random.RandomState(seed))[:cut].tolist() == expected[:cut]
    assert kinds == {True, False, None}


def test_rates_are_shares(make: Make) -> None:
    """4000 documents: within four standard deviations."""
    fim = make(fim_rate=0.3, fim_spm_rate=0.8)
    sample = encode(fim, "abcdefghij")
    length, count = len(sample) - 1, 4000
    changed = spm = 0
    firsts: list[int] = []
    for seed in range(count):
        result = fim(np.concatenate([sample, np.full(20, 5)]), np.random.RandomState(seed))
        document = result[: np.flatnonzero(result == fim.sentinels.eod)[0]]
        if len(document) == length and document[0] != fim.sentinels.prefix:
            continue
        changed += 1
        order, before, *_ = parts_of(fim, document)
        spm += order == "SPM"
        firsts += [len(before)] if order == "PSM" else []
    assert abs(changed / count - 0.3) < 4 * (0.3 * 0.7 / count) ** 0.5
    share = 0.8 + 0.2 * (1 - (10 / 11) ** 2)
    assert abs(spm / changed - share) < 4 * (share * (1 - share) / changed) ** 0.5
    # The smaller of two draws from 1 to 10 is 3.85 on average, with variance 5.5.
    assert abs(np.mean(firsts) - 3.85) < 4 * (5.5 / len(firsts)) ** 0.5


def test_fragments_are_rearranged_by_themselves(make: Make) -> None:
    fim = make(fim_split_sample="<|im_start|>", fim_fragment_rate=1.0, fim_no_prefix="stay", fim_rate=0.5)
    assert fim.split is not None
    texts = ("first file", "", "stay as it is", "last file")
    ids = [fim.tokenizer.encode(text) for text in texts]
    document = np.concatenate([*([*part, fim.split] for part in ids[:-1]), ids[-1]]).astype(np.int64)
    sample = np.concatenate([document, [fim.sentinels.eod], np.full(30, 5)])
    whole = 0
    for seed in range(40):
        result = fim(sample, np.random.RandomState(seed))
        found = result[: np.flatnonzero(result == fim.sentinels.eod)[0]]
        if np.array_equal(found, document):
            whole += 1
            continue
        cuts = np.split(found, np.flatnonzero(found == fim.split))
        fragments = [cuts[0], *(cut[1:] for cut in cuts[1:])]
        assert len(fragments) == 4
        for number in (0, 3):
            _, before, middle, after = parts_of(fim, fragments[number])
            assert before + middle + after == texts[number]
        assert len(fragments[1]) == 0
        assert fragments[2].tolist() == ids[2]
    assert 8 <= whole <= 32


def test_what_cannot_be_taken_apart_stays(make: Make) -> None:
    fim = make()
    eod, im_start = fim.sentinels.eod, fim.tokenizer.backend.token_to_id("<|im_start|>")
    cut_character = fim.tokenizer.encode("a圆")[:-1]
    assert "\ufffd" in fim.tokenizer.decode(cut_character)
    for ids in ([eod, eod, eod], [eod], [im_start, im_start, eod], [*cut_character, eod], [eod, *cut_character]):
        assert fim(np.array(ids, dtype=np.int64), np.random.RandomState(0)).tolist() == ids


def test_shorter_results_are_filled(make: Make) -> None:
    """Letter by letter is a longer way to write a word than the tokenizer's own."""
    fim = make()
    letters = np.array([token for letter in "the function " * 6 for token in fim.tokenizer.encode(letter)])
    sample = np.concatenate([letters, [fim.sentinels.eod]])
    result = fim(sample, np.random.RandomState(0))
    end = int(np.flatnonzero(result == fim.sentinels.eod)[0])
    assert len(result) == len(sample)
    assert end < len(result) - 1
    assert set(result[end + 1 :].tolist()) == {fim.sentinels.pad}


def datasets(prefix: str, tokenizer: Tokenizer, samples: int = 40, **values: Any) -> list[Any]:
    cfg = run_config(**{"data_path": (prefix,), "split": "1,1,0", "seq_length": 32, **values})
    return list(build_datasets(cfg, tokenizer, [samples, 10, 0]))


@pytest.fixture
def prefix(tmp_path: Path, tokenizer: FastTokenizer) -> str:
    texts = [TEXT[number % 40 :] for number in range(60)]
    documents = [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    documents[7:7] = [[tokenizer.eod]] * 2
    return write_documents(tmp_path / "d", documents)


def equal(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(values, other[name]) for name, values in ours.items())


def test_rate_0_is_the_plain_dataset(prefix: str, tokenizer: FastTokenizer) -> None:
    plain, none = datasets(prefix, tokenizer), datasets(prefix, tokenizer, fim_data=True, fim_rate=0.0)
    for split in (0, 1):
        assert all(equal(none[split][i], plain[split][i]) for i in range(len(plain[split])))


def test_a_sample_depends_on_its_number_alone(prefix: str, tokenizer: FastTokenizer) -> None:
    flags = {"fim_data": True, "fim_rate": 0.8}
    train = datasets(prefix, tokenizer, **flags)[0]
    forward = [train[i] for i in range(40)]
    backward = [datasets(prefix, tokenizer, **flags)[0][i] for i in reversed(range(40))]
    assert all(map(equal, forward, reversed(backward)))
    for workers, consumed in ((0, 0), (2, 0), (2, 20)):
        cfg = run_config(num_workers=workers)
        stream = build_data_iterator(datasets(prefix, tokenizer, **flags)[0], cfg, consumed, DataParallelCut(1))
        assert stream is not None
        assert all(torch.equal(next(stream)["tokens"][0], forward[i]["tokens"]) for i in range(consumed, 40))


def test_other_samples_draw_other_numbers() -> None:
    names: list[tuple[int, str, str, int]] = [
        (1, "a", "train", 0), (2, "a", "train", 0), (1, "b", "train", 0), (1, "a", "valid", 0), (1, "a", "train", 1),
        (0, "a", "train", 1), (1, "a", "train", 2**40),
    ]  # fmt: skip
    assert len({sample_random(*name).randint(1 << 30) for name in names}) == len(names)
    assert sample_random(1, "a", "train", 3).randint(1 << 30) == sample_random(1, "a", "train", 3).randint(1 << 30)


def test_a_document_of_the_next_epoch_is_cut_elsewhere(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    ids = tokenizer.encode(TEXT * 4)[:32]
    prefix = write_documents(tmp_path / "one", [[*ids[:31], tokenizer.eod]])
    cfg = run_config(data_path=(prefix,), split="1,0,0", seq_length=16, fim_data=True, fim_rate=1.0)
    train = build_datasets(cfg, tokenizer, [16, 0, 0], shuffle=False)[0]
    assert train is not None
    assert len({tuple(train[i]["tokens"].tolist()) for i in range(0, 16, 2)}) > 4


def test_padding_is_left_out_of_the_loss_of_its_sample(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    letters = [token for letter in "the function " * 6 for token in tokenizer.encode(letter)][:40]
    prefix = write_documents(tmp_path / "d", [[*letters, tokenizer.eod], tokenizer.encode(TEXT * 8)[:99]])
    cfg = run_config(data_path=(prefix,), split="1,0,0", seq_length=40, fim_data=True, fim_rate=1.0)
    train = build_datasets(cfg, tokenizer, [3, 0, 0], shuffle=False)[0]
    assert train is not None
    pad = tokenizer.backend.token_to_id("<fim_pad>")
    counts = []
    for number in (0, 1, 2, 0):
        labels, mask = train[number]["labels"], train[number]["loss_mask"]
        assert torch.equal(mask == 0, labels == pad)
        counts.append(int((labels == pad).sum()))
    assert counts[0] == counts[3] > 10
    assert counts[1] == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fim_prefix_token": "<PRE>"}, r"no such token(.|\n)*--fim-prefix-token <PRE>(.|\n)*<fim_prefix>"),
        ({"fim_pad_token": "<|endoftext|>"}, "must differ from each other"),
        ({"fim_eod_token": "<|im_end|>"}, r"end with another token(.|\n)*<\|endoftext\|>"),
        ({"fim_split_sample": "two words here"}, "around a single token"),
    ],
)
def test_tokens_that_will_not_do(make: Make, values: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**values)


def test_text_is_needed(tokenizer: FastTokenizer) -> None:
    with pytest.raises(DataError, match=r"takes text apart(.|\n)*NullTokenizer"):
        build_fim(DataConfig(fim_data=True), NullTokenizer(9))
    assert build_fim(DataConfig(), tokenizer) is None


def test_a_line_feed_can_split(make: Make) -> None:
    fim = make(fim_split_sample="\n", fim_fragment_rate=0.5)
    assert [fim.split] == fim.tokenizer.encode("\n")
    assert fim.fragment_rate == 0.5
    assert replace(fim, split=None).sentinels == Sentinels(4096, 4097, 4098, 4099, 4092)
