"""`[start]`: a run begins with some of the weights of another, the rest as drawn, or is refused with nothing changed."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_parallel.model.parallel_model import full
from forge_train.inference.stored import open_weights
from forge_train.recipe.schema import Start
from forge_train.run import weights
from forge_train.run.loop import fit
from forge_train.run.weights import tensors_to_take
from harness.pool import World
from train.runs import TINY, prepared

SHORT = ["--schedule.name=constant", "--train.max_steps=2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "tiny.toml").write_text(TINY)
    run, _ = prepared(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", *SHORT])
    fit(run)
    return folder


def begun(source: Path, tmp_path: Path, *more: str) -> dict[str, torch.Tensor]:
    """Weights of a run that has just begun."""
    run, _ = prepared(source / "tiny.toml", [f"--job.dir={tmp_path / 'new'}", *SHORT, *more])
    assert run.state.step == 0 and not run.resumed
    return {name: full(tensor).detach().clone() for name, tensor in run.model.tensors()}


def stored(source: Path) -> dict[str, torch.Tensor]:
    weights = open_weights(source / "run", Registry())
    return weights.read(list(weights.tensors))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], names: Any = None) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in names or found)


def test_a_run_starts_from_all_of_a_run(source: Path, tmp_path: Path) -> None:
    new = begun(source, tmp_path, f"--start.weights={source / 'run'}", "--job.seed=9")
    assert new.keys() == stored(source).keys() and same(new, stored(source))


def test_new_modules_begin_as_drawn_and_are_named(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    new = begun(source, tmp_path, f"--start.weights={source / 'run'}", "--model.layers=3", "--start.exclude=['norm.weight']")
    drawn = begun(source, tmp_path, "--model.layers=3")
    fresh = {name for name in new if name.startswith("blocks.2.") or name == "norm.weight"}
    assert len(fresh) > 5 and same(new, drawn, fresh) and same(new, stored(source), new.keys() - fresh)
    assert not same(new, drawn, new.keys() - fresh)
    said = caplog.text
    assert f"{len(new) - len(fresh)} of {len(new)} tensors are those of step 2" in said
    assert "drawn from job.seed: " in said and "blocks.2.mlp" in said and "not taken from" in said


def test_trials_c6_experts_are_not_drawn_in_the_place_of_weights_that_are_there(source: Path, tmp_path: Path) -> None:
    keys = [f"--start.weights={source / 'run'}", "--model.moe={experts=4}"]
    with pytest.raises(ForgeError, match=r"8 of 23 tensors would be drawn .* has 6 of them under other names"):
        begun(source, tmp_path, *keys)
    new = begun(source, tmp_path, *keys, "--start.draw=['blocks.*.mlp.*']")
    assert same(new, stored(source), [name for name in new if ".mlp." not in name])


def test_names_are_renamed_and_chosen(source: Path, tmp_path: Path) -> None:
    keys = ["--start.include=['blocks.0.*']", "--start.rename=['blocks.1.=blocks.0.', 'blocks.0.=blocks.1.']"]
    new = begun(source, tmp_path, f"--start.weights={source / 'run/checkpoints/step-00000002'}", *keys)
    drawn, old = begun(source, tmp_path), stored(source)
    for name, tensor in new.items():
        wanted = old[name.replace("blocks.0.", "blocks.1.")] if name.startswith("blocks.0.") else drawn[name]
        assert torch.equal(tensor, wanted), name


def test_fault_22_everything_that_does_not_fit_is_listed_and_nothing_changes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(weights, "initialize", lambda *given: changed.append(given))
    monkeypatch.setattr(weights, "copy_tensors", lambda *given: changed.append(given))
    with pytest.raises(ForgeError) as refusal:
        begun(source, tmp_path, f"--start.weights={source / 'run'}", "--model.ffn_dim=32", "--model.vocab_size=64")
    said = str(refusal.value)
    assert "embed.weight: shape (64, 16), in the weights (61, 16)" in said and "nothing was loaded" in said
    assert said.count("blocks.0.mlp") == said.count("blocks.1.mlp") == 3 and changed == []
    assert not (tmp_path / "new").exists(), "a start that is refused leaves nothing"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"include": ("blocks.*", "heads.*")}, "'heads.*' fits no tensor"),
        ({"exclude": ("heads.*",)}, "'heads.*' fits no tensor"),
        ({"rename": ("heads.=tails.",)}, "'heads.=tails.' fits no tensor"),
        ({"rename": ("blocks",)}, "write OLD=NEW"),
        ({"rename": ("=blocks",)}, "write OLD=NEW"),
        ({"rename": ("a.=x.", "a.=y.")}, "has a name twice"),
        ({"rename": ("a.=b.",)}, "gives a.w and b.w one name, b.w"),
        ({"exclude": ("*",)}, "takes no tensor"),
    ],
)
def test_what_has_no_part_is_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ForgeError, match=why.replace("*", r"\*").replace(".", r"\.")):
        tensors_to_take(Start(weights="there", **keys), ["a.w", "b.w", "blocks.0.w"])


def test_the_longest_beginning_counts() -> None:
    start = Start(weights="there", rename=("net.=blocks.", "net.1.=head."))
    assert tensors_to_take(start, ["net.0.w", "net.1.w", "x"]) == {"blocks.0.w": "net.0.w", "head.w": "net.1.w", "x": "x"}


def test_two_sources_or_none_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="has no tensor of"):
        begun(
            source,
            tmp_path,
            f"--start.weights={source / 'run'}",
            "--start.rename=['blocks.=other.', 'embed=e', 'norm=n', 'head=h']",
        )


def test_a_kind_of_number_is_not_converted(source: Path) -> None:
    class Weights:
        tensors: ClassVar = {"norm.weight": type("Entry", (), {"shape": (16,), "dtype": "int64"})}
        facts = type("Facts", (), {"origin": "there"})

    run, _ = prepared(source / "tiny.toml", [f"--job.dir={source / 'kinds'}", *SHORT])
    with pytest.raises(ForgeError, match=r"norm\.weight: dtype float32, in the weights int64"):
        weights.check_start({"norm.weight": "norm.weight"}, Weights(), run.model)  # type: ignore[arg-type]


def test_a_resume_does_not_start_over(source: Path, tmp_path: Path) -> None:
    given = [f"--job.dir={tmp_path / 'new'}", "--schedule.name=constant", f"--start.weights={source / 'run'}"]
    run, _ = prepared(source / "tiny.toml", [*given, "--train.max_steps=1"])
    fit(run)
    trained = {name: full(tensor).clone() for name, tensor in run.model.tensors()}
    again, _ = prepared(source / "tiny.toml", [*given[:2], f"--start.weights={tmp_path / 'gone'}", "--train.max_steps=2"])
    assert again.state.step == 1 and same({name: full(tensor) for name, tensor in again.model.tensors()}, trained)


def _on_rank(recipe: Path, given: list[str]) -> dict[str, torch.Tensor]:
    run, _ = prepared(recipe, given)
    return {name: full(tensor).detach().clone() for name, tensor in run.model.tensors()}


def test_every_layout_starts_alike(world: World, source: Path, tmp_path: Path) -> None:
    keys = [f"--start.weights={source / 'run'}", "--model.layers=3", "--start.exclude=['norm.weight']"]
    alone = begun(source, tmp_path, *keys)
    given = [f"--job.dir={tmp_path / 'both'}", *SHORT, *keys, "--parallel.dp_shard=2"]
    for found in world.run(_on_rank, 2, source / "tiny.toml", given):
        assert found.keys() == alone.keys() and same(found, alone)
