"""The package of a new family: drafted where there is none, told about, proved."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import ENTRY_POINT_GROUP, families
from mindspeed_llm.tools.compare.__main__ import EXACT, Run
from mindspeed_llm.tools.new_family import proof
from mindspeed_llm.tools.new_family.drafting import Draft, draft_family
from mindspeed_llm.tools.new_family.folder import Model
from mindspeed_llm.tools.new_family.library import known_families
from mindspeed_llm.tools.new_family.writing import write_family

Say = Callable[[str], None]
Measure = Callable[[Path, str, Path], float]
"""``(folder, module, tiny)``: how far logits of the family ``module`` in ``folder`` are from transformers'."""

_PYPROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{project}"
version = "0.1"
dependencies = ["mindspeed_llm"]

[project.entry-points."{group}"]
{name} = "{module}:FAMILY"

[tool.setuptools]
py-modules = ["{module}"]
"""


def measured(folder: Path, module: str, tiny: Path) -> float:
    """:data:`Measure` in this process."""
    with proof.registered(folder, module):
        return proof.logit_error(tiny)


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        model: to be known.
        name: of its family.
        output: folder of the package.
        say: takes lines of the report.
        run: runs a side of a comparison.
        measure: compares logits.
    """

    model: Model
    name: str
    output: Path
    say: Say
    run: Run
    measure: Measure = measured

    @property
    def module(self) -> str:
        """Name of the module with the family."""
        return f"mindspeed_llm_{self.name}"

    @property
    def file(self) -> Path:
        """The family's file."""
        return self.output / f"{self.module}.py"

    def draft(self) -> int:
        """Write the package; the number of things that a person has to see to.

        Raises:
            ConfigError: a family of that name, or for that model, is there.
            SuiteError: the model cannot be read at all.
        """
        self._refuse_known()
        draft = draft_family(self.model, known_families(), self.name)
        if self.model.kind and not draft.left:
            draft = self._decided(draft)
        self.output.mkdir(parents=True, exist_ok=True)
        self.file.write_text(write_family(draft), encoding="utf-8")
        project = self.module.replace("_", "-")
        about = _PYPROJECT.format(project=project, group=ENTRY_POINT_GROUP, name=self.name, module=self.module)
        (self.output / "pyproject.toml").write_text(about, encoding="utf-8")
        self.say(f"{self.file}: drafted after {draft.nearest}")
        for what, lines in _remarks(draft):
            for line in lines:
                self.say(f"  {what}: {line}")
        for line in draft.left:
            self.say(f"  TO DO: {line}")
        return len(draft.left)

    def _refuse_known(self) -> None:
        if self.name in families():
            raise ConfigError("there is a family of that name", got=self.name, fix="give another --name")
        architectures = set(self.model.config["architectures"])
        for family in families().values():
            if architectures & set(family.hf_architectures):
                raise ConfigError(
                    "there is a family for this model",
                    got=f"{', '.join(sorted(architectures))}: {family.name}",
                    fix="--load takes the folder as it is; what the family lacks is added to its file",
                )

    def _decided(self, draft: Draft) -> Draft:
        """The draft with what neither config.json nor a shape says as transformers computes it; as it was where no
        choice gives the same logits."""
        with tempfile.TemporaryDirectory(prefix="mindspeed_llm.new_family.") as scratch:
            tiny = Path(scratch, "tiny")
            proof.write_tiny(self.model.kind, draft.family, tiny)
            for number, unsaid in enumerate(_choices(draft.unsaid)):
                candidate = draft_family(self.model, known_families(), f"draft_{number}", unsaid)
                Path(scratch, f"draft_{number}.py").write_text(write_family(candidate), encoding="utf-8")
                if self.measure(Path(scratch), f"draft_{number}", tiny) <= EXACT:
                    return draft_family(self.model, known_families(), self.name, unsaid)
        return draft

    def prove(self) -> int:
        """Prove the family in the package; the number of parts that failed.

        Raises:
            ConfigError: the file is no family.
            ConversionError: transformers cannot build the model.
        """
        if not self.model.kind:
            self.say("  not proved: transformers has no class for the model; docs/add-a-model.md says what to do")
            return 1
        with proof.registered(self.output, self.module), tempfile.TemporaryDirectory() as scratch:
            family = next((one for one in families().values() if one.name == self.name), None)
            if family is None:
                raise ConfigError(f"{self.file} has another family", allowed=f'name="{self.name}"')
            failed = 0
            for title, faults in self._parts(family, Path(scratch, "tiny")):
                failed += bool(faults)
                self.say(f"  {'FAILED' if faults else 'proved'}: {title}")
                for line in faults:
                    self.say(f"    {line}")
        return failed

    def _parts(self, family: proof.ModelFamily, tiny: Path) -> Iterator[tuple[str, Sequence[str]]]:
        yield "keys, names and shapes of the folder", list(proof.misfits(family, self.model))
        proof.write_tiny(self.model.kind, family, tiny)
        error = self.measure(self.output, self.module, tiny)
        yield "logits against transformers", [f"relative RMS {error:.1e}"] if not error <= EXACT else []
        yield from proof.prove(family, tiny, self.run)


def _choices(unsaid: Iterable[str]) -> Iterator[dict[str, bool]]:
    """Every choice, the plainest first: most models have none of it."""
    names = list(unsaid)
    for chosen in sorted(itertools.product((False, True), repeat=len(names)), key=sum):
        yield dict(zip(names, chosen, strict=True))


def _remarks(draft: Draft) -> Iterator[tuple[str, Sequence[str]]]:
    yield "by words or shape only", draft.placing.guesses
    yield "held at this model's value, another is refused", draft.reading.pinned
    yield "differs", draft.reading.notes
    if not draft.model.kind:
        yield f"unsaid, as in {draft.nearest}", [f"{name} {value}" for name, value in draft.unsaid.items()]
