"""Runs tasks of lmms-eval (Zhang et al., LMMs-Lab) on a vision-language model in any layout that its fusion supports.

`LmmsModel` and `LmmsChatModel` are `lmms_eval.api.model.lmms`. The second one is for tasks that only generate: such a task says
where its images stand among the text, and may have several turns. Needs the extra `forge-train[lmms]`.
"""

# pyright: reportMissingImports=false
# The library is not where types are checked, because it pins versions that other extras exclude.

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmms_eval.api.instance import GenerationResult
from lmms_eval.api.model import lmms
from lmms_eval.api.task import ConfigurableTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.evaluator_utils import get_task_list
from lmms_eval.tasks import TaskManager, get_task_dict
from lmms_eval.utils import simple_parse_args_string

from forge_core.errors import DataError, ForgeError
from forge_data.chat.conversation import Turn
from forge_train.inference.answers import GenerationSettings
from forge_train.inference.tasks import Results, generators_kept, metric_values, results_of_first, task_index
from forge_train.inference.visual_answers import VisualAnswerModel, VisualRequest, open_alone
from forge_vlm.data.image_readers import is_image
from forge_vlm.data.question_prompts import Clips, file_of

_SCORED = ("multiple_choice", "loglikelihood")
_SUPPORTED = (*_SCORED, "generate_until")
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


class LikelihoodResult(tuple[float, bool], GenerationResult):
    """The value of an answer, and whether it is greedy. Version 0.7.3 turns a plain tuple into text, which its metrics cannot
    read, but takes the text of a `GenerationResult` as it is."""

    def __init__(self, pair: tuple[float, bool]) -> None:
        GenerationResult.__init__(self, pair)  # type: ignore[arg-type]


class LmmsModel(lmms):
    """A model for tasks whose images come before the text."""

    is_simple = True

    def __init__(self, model: VisualAnswerModel) -> None:
        """`model`: answers the requests; every rank has the same requests."""
        super().__init__()
        # In a list, because the library removes models from the attributes.
        self._models = [model]

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "LmmsModel":
        """Returns the model that lmms-eval's own command line describes, on one process: `--model forge --model_args
        checkpoint=runs/mine`. Further arguments: `weights`, `template`, `tokenizer`, `frames`.

        Raises:
            ForgeError: there are several processes, an argument is unknown, or the checkpoint cannot be used.
        """
        given: dict[str, Any] = dict(simple_parse_args_string(arg_string))
        size = (additional_config or {}).get("batch_size")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ForgeError(
                "lmms-eval's command gives each process other questions, but the ranks of a Forge model answer together; use one "
                "process, or torchrun with forge-train evaluate CHECKPOINT --lmms TASKS"
            )
        known = ("checkpoint", "weights", "template", "tokenizer", "frames")
        if (unknown := sorted(set(given) - set(known))) or "checkpoint" not in given:
            fault = f"unknown arguments {', '.join(unknown)}" if unknown else "no checkpoint"
            raise ForgeError(
                f"--model forge has {fault}; write --model_args checkpoint=RUN, and optionally {', '.join(known[1:])}"
            )
        return cls(open_alone(**given, batch=int(size) if size else 8))

    @property
    def answers(self) -> VisualAnswerModel:
        """The model that answers."""
        return self._models[0]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Collective: scores answers; see `VisualAnswerModel.likelihoods`.

        The library documents log-likelihoods, and computes a perplexity from them, but takes the choice with the *smallest* value
        of a multiple-choice task, because most of its models return a loss. So the value of a choice has the sign with which the
        installed version finds the likeliest choice, and the answer of a `loglikelihood` task has its log-likelihood.
        """
        asked, signs = [], []
        for request in requests:
            if len(request.args) != 6:
                raise ForgeError(
                    f"task {request.task_name} asks for the log-likelihood of an answer without its question (acc_mutual_info), "
                    "which Forge does not support; remove the metric"
                )
            context, answer, visuals, number, task, split = request.args
            document = partial(self._document, task, split, number)
            # Choices are texts, and the answer of a `loglikelihood` task is a function of the document.
            signs.append(_sign_of_choices() if isinstance(answer, str) else 1)
            text = answer if isinstance(answer, str) else str(answer(document()))
            asked.append(
                VisualRequest(_place(task, split, number), partial(self._simple_turns, context, visuals, document), text.strip())
            )
        scores = self.answers.likelihoods(asked)
        return [LikelihoodResult((sign * score, greedy)) for sign, (score, greedy) in zip(signs, scores, strict=True)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Collective: generates answers.

        Raises:
            ForgeError: a task sets a generation option that Forge does not have, or shows something other than images and videos.
        """
        asked: list[VisualRequest] = []
        groups: dict[GenerationSettings, list[int]] = {}
        for index, request in enumerate(requests):
            turns, options, place = self._asked(request.args)
            asked.append(VisualRequest(place, turns))
            groups.setdefault(_settings(options), []).append(index)
        texts: dict[int, str] = {}
        for settings, indices in groups.items():
            texts |= zip(indices, self.answers.texts([asked[index] for index in indices], settings), strict=True)
        return [texts[index] for index in range(len(requests))]

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Refuses tasks whose next question depends on an answer."""
        raise ForgeError("tasks of several rounds are not supported; remove the task")

    def _asked(self, args: Sequence[Any]) -> tuple[Callable[[], Any], Mapping[str, Any], str]:
        """Returns of a request: the function that makes its turns, its generation options, and its place."""
        context, options, visuals, number, task, split = args
        document = partial(self._document, task, split, number)
        return partial(self._simple_turns, context, visuals, document), options, _place(task, split, number)

    def _document(self, task: str, split: str, number: int) -> Any:
        return self.task_dict[task][split][number]

    def _simple_turns(self, context: str, visuals: Callable[[Any], Any], document: Callable[[], Any]) -> Any:
        shown = visuals(document()) or []
        content = [{"type": "visual", "url": each} for each in shown] + [{"type": "text", "text": context}]
        return self._turns([{"role": "user", "content": content}])

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], Callable[[str], bytes]]:
        """Returns messages of the library as turns, and the function that reads their images."""
        clips = Clips(Path(), self.answers.frames, self.answers.told)
        contents: dict[str, bytes] = {}
        turns = []
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [piece for each in content for piece in _pieces(each, contents, clips)]
                if all(piece["type"] == "text" for piece in content):
                    content = "".join(piece["text"] for piece in content)
            turns.append(Turn(message["role"], content))
        return turns, lambda name: contents[name] if name in contents else clips.fetch(name)


class LmmsChatModel(LmmsModel):
    """A model for tasks that give messages, with images anywhere in them."""

    is_simple = False

    def _asked(self, args: Sequence[Any]) -> tuple[Callable[[], Any], Mapping[str, Any], str]:
        _, messages, options, number, task, split = args
        document = partial(self._document, task, split, number)
        return lambda: self._turns(messages(document())), options, _place(task, split, number)


def _place(task: str, split: str, number: int) -> str:
    return f"document {number} of {task} ({split})"


def _pieces(piece: Mapping[str, Any], contents: dict[str, bytes], clips: Clips) -> Iterator[dict[str, str]]:
    """Yields the pieces of a turn for one of a message; puts decoded images into `contents`."""
    kind = piece["type"]
    if kind == "text":
        yield {"type": "text", "text": piece["text"]}
        return
    shown = piece["url"]
    if isinstance(shown, list | tuple):
        for each in shown:
            yield from _pieces({"type": kind, "url": each}, contents, clips)
        return
    content = file_of(shown)
    if kind in ("image", "visual", "video") and content is not None:
        name = f"image {len(contents)}"
        contents[name] = content
        yield {"type": "image", "path": name}
    elif kind in ("image", "visual") and isinstance(shown, str) and is_image(shown):
        contents[shown] = _content(shown)
        yield {"type": "image", "path": shown}
    elif kind in ("video", "visual") and isinstance(shown, str):
        yield from clips.pieces(shown)
    else:
        raise ForgeError(
            f"a task shows {kind} {type(shown).__name__}, but Forge supports images and video files; remove the task"
        )


def _content(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as cause:
        raise DataError(f"the image {name} cannot be read: {cause.strerror or cause}; download the data of the task") from cause


def _settings(options: Mapping[str, Any]) -> GenerationSettings:
    """Returns generation options of a task; those without effect on greedy decoding of one beam are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    given.pop("image_aspect_ratio", None)  # of LLaVA; the tiling of a model is that of its training
    if given.get("num_beams") == 1:
        del given["num_beams"]
    if not given.get("temperature", 1.0 if given.get("do_sample") else 0.0):
        given = {name: value for name, value in given.items() if name not in ("do_sample", "temperature", "top_p", "top_k")}
    return GenerationSettings.of(given)


def _sign_of_choices() -> int:
    """Returns -1 if the installed lmms-eval takes the choice with the smallest value for the model's, else 1."""
    task: Any = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice",
        config=SimpleNamespace(process_results=None),
        multiple_input=0,
        multiple_target=0,
        _metric_fn_list={"acc": None},
        doc_to_choice=lambda _: ["a", "b"],
        doc_to_target=lambda _: 0,
    )
    found = ConfigurableTask.process_results(task, {}, [(1.0, True), (2.0, True)])
    return -1 if found["acc"] == 1 else 1


def open_lmms_tasks(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Returns the index of tasks, including those in a folder of task files.

    Raises:
        ForgeError: a name is not a task; the error suggests similar names.
    """
    return task_index("lmms-eval", partial(TaskManager, verbosity="ERROR"), names, folder)


def lmms_results_of(
    model: VisualAnswerModel, names: Sequence[str], manager: TaskManager, shots: int | None = None, limit: int | None = None
) -> Results:
    """Collective: runs tasks; returns the metrics of each task, and of groups as the library computes them, on all ranks.

    Args:
        model: the model to evaluate.
        names: names of tasks, groups or tags.
        manager: the index of tasks; see `open_lmms_tasks`.
        shots: examples before each question; None uses the task's own number.
        limit: maximum number of questions per task.

    Raises:
        ForgeError: a task is of a kind that Forge does not support, or its data cannot be loaded.
    """
    mine: Results = {}
    with generators_kept(), _as_one_process():
        for name in names:
            chat = not any(kind in _SCORED for kind in _kinds(name, manager))
            found: Any = simple_evaluate(
                model=(LmmsChatModel if chat else LmmsModel)(model),
                tasks=[name],
                num_fewshot=shots,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=0,
                distributed_executor_backend="torchrun",
                process_docs_parallel=1,
                verbosity="ERROR",
            )
            mine |= {task: dict(metric_values(metrics)) for task, metrics in found["results"].items()}
    return results_of_first(mine, model.answers.topology)


def _kinds(name: str, manager: TaskManager) -> set[str]:
    """Returns the output types of a task, or of the tasks of a group.

    Raises:
        ForgeError: one of them is not supported, or the data of a task cannot be loaded.
    """
    try:
        tasks: list[Any] = [found.task for found in get_task_list(get_task_dict([name], manager, "simple"))]
    except Exception as cause:  # of any loader, and of the library's retries
        raise ForgeError(
            f"the data of task {name!r} cannot be loaded: {cause.__cause__ or cause}; download it where there is a network, or "
            "use a task file of your own with --folder"
        ) from cause
    kinds = {str(task.OUTPUT_TYPE) for task in tasks}
    if unknown := sorted(kinds - set(_SUPPORTED)):
        raise ForgeError(f"task {name!r} is of type {', '.join(unknown)}, but Forge supports {', '.join(_SUPPORTED)}; remove it")
    return kinds


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hides torchrun from the library, which would give each rank other questions; here all ranks answer all of them."""
    before = {name: os.environ.get(name) for name in _ALONE}
    os.environ.update(_ALONE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
