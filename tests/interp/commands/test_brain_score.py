"""The subject for Brain-Score in examples: its values are those of plain forwards, and what is not there is refused."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_interp.captures import capture
from forge_train.inference.stored import load_model, open_weights

FILE = Path(__file__).parents[3] / "examples" / "brain_score" / "subject.py"
VALUE = "blocks.1.residual_after"
PARTS = ["A cat", "saw the", "old dog"]


@pytest.fixture(scope="module")
def subject_class() -> Any:
    spec = importlib.util.spec_from_file_location("brain_score_subject", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ForgeSubject


@pytest.fixture
def subject(trained: Path, subject_class: Any) -> Any:
    return subject_class(trained / "run", {"language_system": VALUE})


def plain(run: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What leaves block 1 at the last letter of each part in its context, and the logits of the whole text."""
    model, values = load_model(open_weights(run, Registry())), []
    with torch.no_grad():
        for number in range(len(PARTS)):
            tokens = torch.tensor([list(" ".join(PARTS[: number + 1]).encode())])
            with capture(model, VALUE) as seen:
                logits = model(tokens)
            values.append(seen[VALUE][0, -1].float())
    return values, logits[0].float()


def test_recordings_are_the_values_of_plain_forwards(trained: Path, subject: Any) -> None:
    subject.start_neural_recording("language_system", "fMRI")
    found = subject.digest_text(PARTS)
    values, _ = plain(trained / "run")
    neural = found["neural"]
    assert set(found) == {"neural"} and neural.dims == ("presentation", "neuroid")
    assert np.abs(neural.values - torch.stack(values).numpy()).max() < 1e-6
    assert neural["stimulus"].values.tolist() == PARTS and neural["part_number"].values.tolist() == [0, 1, 2]
    assert {*neural["layer"].values.tolist()} == {VALUE} and {*neural["region"].values.tolist()} == {"language_system"}
    assert len({*neural["neuroid_id"].values.tolist()}) == neural.shape[1] and {*neural["recording_type"].values} == {"fMRI"}


def test_reading_times_are_surprisals_of_each_part_in_its_context(trained: Path, subject: Any) -> None:
    subject.start_behavioral_task("reading_times")
    found = subject.digest_text(PARTS)["behavior"]
    _, logits = plain(trained / "run")
    text = list(" ".join(PARTS).encode())
    each = [-float(logits[place - 1].log_softmax(-1)[text[place]]) for place in range(1, len(text))]
    ends = np.cumsum([len(part) + (number > 0) for number, part in enumerate(PARTS)])
    wanted = [sum(each[: ends[0] - 1]), sum(each[ends[0] - 1 : ends[1] - 1]), sum(each[ends[1] - 1 :])]
    assert found.values.tolist() == pytest.approx(wanted, rel=1e-5)
    assert found.values.sum() == pytest.approx(sum(each), rel=1e-5), "every token but the first is read once"
    assert math.isnan(subject.digest_text("A")["behavior"].values[0])


def test_the_next_word_is_the_likeliest_token(trained: Path, subject: Any) -> None:
    subject.start_behavioral_task("next_word")
    subject.start_neural_recording("language_system", "fMRI")
    found = subject.digest_text(PARTS)
    _, logits = plain(trained / "run")
    assert found["behavior"].values[-1] == bytes([int(logits[-1].argmax())]).decode(errors="replace")
    assert set(found) == {"behavior", "neural"} and subject.identifier() == "forge-run"


def test_what_is_not_there_is_refused(trained: Path, subject: Any, subject_class: Any) -> None:
    with pytest.raises(ForgeError, match="nothing is recorded"):
        subject.digest_text("A")
    with pytest.raises(ForgeError, match="no inner value stands for 'V4'; there are language_system"):
        subject.start_neural_recording("V4", "fMRI")
    with pytest.raises(ForgeError, match="task 'sorting' is not implemented; choose next_word or reading_times"):
        subject.start_behavioral_task("sorting")
    subject.start_behavioral_task("next_word")
    for text in ("", "x" * 10_000):
        with pytest.raises(ForgeError, match="tokens cannot be read; the model takes 1 to"):
            subject.digest_text(text)
    with pytest.raises(ForgeError, match="residual_aftr"):
        subject_class(trained / "run", {"language_system": "blocks.1.residual_aftr"})
