"""`forge-train evaluate CHECKPOINT`: loss on held-out sets; results of tasks of the LM Evaluation Harness or of lmms-eval; or
answers to questions about images in local files."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_core.terminal import Console

if TYPE_CHECKING:
    from forge_core.protocols.weights import Weights
    from forge_train.inference.visual_answers import VisualAnswerModel


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="A run's directory, a checkpoint, or the URL of one of them; or a Hugging Face folder.")
    ],
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Recipe for all sections except the model.", show_default=False)
    ] = None,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of the LM Evaluation Harness, separated by commas, instead of held-out sets.")
    ] = None,
    lmms: Annotated[
        str | None, typer.Option(help="Tasks of lmms-eval, separated by commas, for a vision-language model.")
    ] = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option(help="Questions about images: a file of JSON lines or Parquet; may be given several times."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder with your own task files; with --questions, folder of their images.")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before each question. Default: as the task says.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of questions per task or file.")] = None,
    batch: Annotated[int | None, typer.Option(help="For tasks and questions: texts per forward and process. Default: 8.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For tasks and questions: a tokenizer.json or sentencepiece model to use.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="For --lmms and --questions: chat template to use instead: a name, a file or a folder.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="For --lmms and --questions: maximum number of frames of a video.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="For --questions, separated by commas: letter, likelihood, exact_match, anls, vqa_accuracy, relaxed_accuracy."
        ),
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="For --questions: last line of each question.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="For --questions: maximum number of tokens of an answer. Default: 32.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="For --questions: a file to which each answer is written, as JSON lines.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Evaluate a checkpoint: on the held-out sets of its recipe or others (--data.evaluation.NAME.name=text ...), or on --tasks,
    --lmms or --questions.

    Runs as one process or under torchrun, on any layout: --parallel.tp=2. The result does not depend on the number of processes.
    """
    from dataclasses import asdict

    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_parallel.launch import process_group
    from forge_parallel.launch.environment import read_launcher
    from forge_train.inference.evaluation import recipe_for, scores
    from forge_train.inference.stored import open_weights
    from forge_train.process.ranks import content_of, on_ranks
    from forge_train.recipe.load import load_recipe

    registry, where, console = Registry(), read_launcher(os.environ), Console(as_json=as_json)
    first = where.rank == 0

    of_images = {"--template": template, "--frames": frames}
    of_tasks = {"--folder": folder, "--limit": limit, "--batch": batch, "--tokenizer": tokenizer}
    of_questions = {"--metrics": metrics, "--instruction": instruction, "--max-tokens": max_tokens, "--predictions": predictions}
    kinds: dict[str, tuple[object, Mapping[str, object]]] = {
        "--tasks": (tasks, of_tasks | {"--shots": shots}),
        "--lmms": (lmms, of_tasks | {"--shots": shots} | of_images),
        "--questions": (questions or None, of_tasks | of_images | of_questions),
    }

    def evaluate_tasks() -> None:
        from forge_train.hooks.evaluation import import_harness
        from forge_train.inference.stored import load_sharded_model, recipe_to_generate
        from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for

        names = [name for name in (tasks or "").split(",") if name]
        index = import_harness().open_tasks(names, folder)
        opened = open_weights(checkpoint, registry, weights)
        note = console.note if first else lambda _: None
        coder = tokenizer_for(opened, tokenizer, registry, note)
        check_tokenizer(coder, opened, note)
        resolved = recipe_to_generate(opened, context.args, where.size, registry)
        device = process_group.init_process_groups(
            where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
        )
        model = import_harness().HarnessModel(
            load_sharded_model(opened, resolved, device, registry),
            coder,
            batch=batch or 8,
            before_all=opened.facts.special_tokens.get("bos_token_id"),
        )
        results = import_harness().results_of(model, names, index, shots, limit)
        report(opened, "tasks", results)

    def open_model(option: str) -> "tuple[Weights, VisualAnswerModel]":
        from forge_train.inference.visual_answers import open_visual_model

        opened = open_weights(checkpoint, registry, weights)
        note = console.note if first else lambda _: None
        asked: dict[str, Any] = {"template": template, "tokenizer": tokenizer, "frames": frames, "batch": batch or 8}
        return opened, open_visual_model(opened, context.args, where, registry, note, option=option, **asked)

    def evaluate_lmms() -> None:
        from forge_train.hooks.evaluation import import_library

        names = [name for name in (lmms or "").split(",") if name]
        with redirect_stdout(sys.stderr):  # the library logs to standard output, where the JSON document belongs
            harness = import_library("forge_train.inference.lmms_harness", "lmms_eval", "lmms-eval", "lmms")
            index = harness.open_lmms_tasks(names, folder)
            opened, model = open_model("--lmms")
            results = harness.lmms_results_of(model, names, index, shots, limit)
        report(opened, "tasks", results)

    def evaluate_files() -> None:
        from forge_core.files import write_file
        from forge_train.inference.questions import NEW_TOKENS, evaluate_questions, open_questions

        if predictions is not None and not predictions.parent.is_dir():
            raise ForgeError(f"--predictions {predictions}: the folder {predictions.parent} does not exist; create it")
        chosen = [name for name in (metrics or "").split(",") if name]
        files = [open_questions(path, folder, chosen, limit) for path in questions or ()]
        if len({file.name for file in files}) < len(files):
            raise ForgeError("two files of --questions have the same name; rename one, because results are listed by name")
        opened, model = open_model("--questions")
        found = {file.name: evaluate_questions(model, file, instruction, max_tokens or NEW_TOKENS) for file in files}
        if predictions is not None and first:
            rows = [{"file": name} | dict(row) for name, one in found.items() for row in one.rows]
            write_file(predictions, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        report(opened, "questions", {name: one.metrics for name, one in found.items()})

    def report(opened: "Weights", kind: str, results: Mapping[str, Mapping[str, float | None]]) -> None:
        if first and as_json:
            console.document({"checkpoint": opened.facts.origin, "step": opened.facts.step, kind: results})
        for name, values in results.items() if first and not as_json else ():
            console.text(f"{name}: {_described(values)}")

    def evaluate_sets() -> None:
        if recipe is not None:
            load_recipe(recipe, (), None, registry)  # allows the recipe's Python files to run, also if the weights name them
        opened = open_weights(checkpoint, registry, weights)
        resolved = recipe_for(opened, recipe, context.args, where.size, registry)
        device = process_group.init_process_groups(
            where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
        )
        sets = []
        for score in scores(opened, resolved, device, registry, console.note if first else lambda _: None):
            sets.append(asdict(score))
            if first and not as_json:
                bits = f"  {score.bits_per_byte:.4f} bits per byte" if score.bits_per_byte is not None else ""
                means = "".join(f"  {name} {value:.4f}" for name, value in score.metrics.items())
                numbers = f"loss {score.loss:.4f}{means or f'  perplexity {score.perplexity:.2f}'}{bits}"
                console.text(f"{score.name}: {numbers}  {score.tokens:,} tokens")
        if first and as_json:
            console.document({"checkpoint": opened.facts.origin, "step": opened.facts.step, "sets": sets})

    def body() -> None:
        kind = _kind_of(kinds, recipe)
        {"--tasks": evaluate_tasks, "--lmms": evaluate_lmms, "--questions": evaluate_files, None: evaluate_sets}[kind]()

    on_ranks(where, console, body)


def _kind_of(kinds: Mapping[str, tuple[object, Mapping[str, object]]], recipe: str | None) -> str | None:
    """Returns the option that says what to evaluate; None for held-out sets.

    Args:
        kinds: for each such option its value, and the options with an effect beside it, with their values.
        recipe: value of --recipe.

    Raises:
        ForgeError: such options exclude each other or are empty, or an option would have no effect.
    """
    from forge_core.errors import ForgeError

    chosen = [name for name, (value, _) in kinds.items() if value is not None]
    if len(chosen) > 1:
        raise ForgeError(f"{' and '.join(chosen)} exclude each other; give one")
    kind = chosen[0] if chosen else None
    effective = kinds[kind][1] if kind is not None else {}
    given = {name for _, options in kinds.values() for name, value in options.items() if value is not None}
    if unused := sorted(given - effective.keys()):
        needed = [each for each, (_, options) in kinds.items() if set(unused) & options.keys()]
        names = ", ".join(unused)
        raise ForgeError(f"{names} has no effect without {' or '.join(needed)}; set one of them, or remove {names}")
    if kind is not None and recipe is not None:
        what = "tasks with their own data" if kind != "--questions" else "questions of files"
        raise ForgeError(f"--recipe (held-out sets) and {kind} ({what}) exclude each other; remove one")
    value = kinds[kind][0] if kind is not None else None
    if isinstance(value, str) and not [name for name in value.split(",") if name]:
        example = "hellaswag,arc_easy" if kind == "--tasks" else "mmmu_val,chartqa"
        raise ForgeError(f"{kind} names no task; list tasks separated by commas, such as {kind} {example}")
    return kind


def _described(values: Mapping[str, float | None]) -> str:
    """Returns results as text: `acc 0.5000 ± 0.1000  n 4`."""
    shown = []
    for name, value in values.items():
        if name.endswith("_stderr"):
            continue
        error = values.get(f"{name}_stderr")
        text = str(value) if isinstance(value, int) else f"{value:.4f}"
        shown.append(f"{name} {text}" + (f" ± {error:.4f}" if error is not None else ""))
    return "  ".join(shown)
