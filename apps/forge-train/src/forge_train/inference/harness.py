"""Runs tasks of the LM Evaluation Harness (Gao et al., EleutherAI) on a model in training or on stored weights, in any layout.

`HarnessModel` is a `lm_eval.api.model.LM`. Needs the extra `forge-train[eval]`.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_parallel.model.parallel_model import ParallelModel
from forge_train.inference.answers import AnswerModel, AnswerPrompt, GenerationSettings, ScoredAnswer
from forge_train.inference.tasks import Results, generators_kept, metric_values, results_of_first, task_index

_log = logging.getLogger(__name__)
Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, and as tokens."""


class HarnessModel(TemplateLM):
    """Computes log-likelihoods and continuations for tasks. Every rank has the same requests; data ranks share the rows of
    log-likelihoods.

    Args:
        model: the model, evaluated with its current weights.
        tokenizer: the tokenizer of the model.
        batch: rows per forward and rank.
        before: called on all ranks before each forward of new texts, with the number of earlier forwards; may raise to stop.
        before_all: token before a text without context, for tokenizers that add no token before a text; by default the token
            that ends documents.

    Raises:
        ForgeError: the tokenizer has no token to put before a text.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        batch: int = 8,
        before_all: int | None = None,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        prefix = tokenizer.prefix[-1] if tokenizer.prefix else before_all
        if tokenizer.eos is None and prefix is None:
            raise ForgeError(
                f"tokenizer {tokenizer.name} has no end-of-document token, which tasks need before a text; use another tokenizer"
            )
        self.coder = tokenizer
        self.end = tokenizer.eos
        self.prefix = prefix if prefix is not None else tokenizer.eos
        ends = () if self.end is None else (self.end,)
        self.answers = AnswerModel(model, tokenizer, ends=ends, batch=batch, before=before)
        self.max_length: int = self.answers.max_length
        self._told = False

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        assert self.prefix is not None
        return self.prefix if self.end is None else self.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        assert self.prefix is not None
        return self.prefix

    @property
    def tokenizer_name(self) -> str:
        """Name for caches of requests."""
        return self.coder.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text, with the tokenizer's prefix unless `add_special_tokens` is False."""
        tokens = [int(token) for token in self.coder.encode(string)]
        return tokens if add_special_tokens is False else [*self.coder.prefix, *tokens]

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        """Collective: returns per request log p(continuation | context), and True if greedy decoding would generate it."""
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].read))
        found = self.answers.scores(order, lambda index: rows[index])
        return [score for _, score in sorted(zip(order, found, strict=True))]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Collective: as `_loglikelihood_tokens`, for texts; rank 0 shows progress."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.answers.topology.rank > 0)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Collective: returns log p of whole texts; each token is predicted once, with as much context as the model allows."""
        windows: list[Request] = []
        counts = []
        for request in requests:
            # The first window adds the prefix; a prefix in the tokens would be duplicated, and predicted.
            tokens = self.tok_encode(*request.args, add_special_tokens=False)
            given = {"token_list": tokens, "prefix_token": self.prefix_token_id}
            pairs = get_rolling_token_windows(**given, max_seq_len=self.max_length, context_len=1)
            pieces = [(("", ""), *make_disjoint_window(pair)) for pair in pairs]
            windows += pieces
            counts.append(len(pieces))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Collective: returns continuations up to the first of the texts `until`; every rank generates all of them.

        Raises:
            ForgeError: a task sets a generation option that Forge does not have, or too many new tokens.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts: dict[int, str] = {}
        for indices in groups.values():
            wanted = GenerationSettings.of(requests[indices[0]].args[1])
            room = self.max_length - wanted.tokens
            if room < 1:
                raise ForgeError(
                    f"a task needs {wanted.tokens} new tokens, but model.max_length = {self.max_length}; "
                    "set max_gen_toks in its generation_kwargs, or remove the task"
                )
            prompts = {index: self._cut(self.tok_encode(requests[index].args[0]), room) for index in indices}
            order = sorted(indices, key=lambda index: -len(prompts[index]))
            made = self.answers.texts(
                order, lambda index, known=prompts: AnswerPrompt(known[index] or [self.prefix_token_id]), wanted
            )
            texts |= zip(order, made, strict=True)
        return [texts[index] for index in range(len(requests))]

    def _row(self, context: list[int], continuation: list[int]) -> ScoredAnswer:
        """Returns the tokens of a request, cut from the left to the model's limit."""
        if not continuation or len(continuation) > self.max_length:
            raise ForgeError(
                f"a task has a continuation of {len(continuation)} tokens; the model supports 1 to max_length = {self.max_length}"
            )
        return ScoredAnswer(self._cut(context + continuation, self.max_length + 1)[:-1], continuation)

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        if len(tokens) > length and not self._told:
            self._told = True
            _log.warning("texts of tasks exceed model.max_length = %d; only their last tokens are used", self.max_length)
        return tokens[-length:]


def open_tasks(names: Iterable[str], folder: Path | None) -> TaskManager:
    """Returns the index of tasks, including those in a folder of task files.

    Raises:
        ForgeError: a name is not a task; the error suggests similar names.
    """
    return task_index("lm-eval", TaskManager, names, folder)


def new_tokens(names: Iterable[str], manager: TaskManager) -> Iterator[tuple[str, int]]:
    """Yields name and number of new tokens of each task that generates text, also in groups and tags, without loading data.

    Tasks that are defined in Python code are left out.
    """
    left, seen = list(names), set[str]()
    while left:
        name = left.pop(0)
        entry: Any = None if name in seen else manager.task_index.get(name)
        seen.add(name)
        config: dict[str, Any] = getattr(entry, "cfg", None) or {}
        # A tag has no file, and its `tags` are its tasks; the `tags` of a task are the tags that it belongs to.
        members: Any = config.get("task") if config else sorted(getattr(entry, "tags", ()))
        inner = [item.get("task") if isinstance(item, dict) else item for item in members] if isinstance(members, list) else []
        left += [item for item in inner if isinstance(item, str)]
        if config.get("output_type") == "generate_until":
            kwargs = config.get("generation_kwargs")
            yield name, GenerationSettings.of(kwargs if isinstance(kwargs, Mapping) else {}).tokens


def results_of(
    model: HarnessModel, names: Sequence[str], manager: TaskManager, shots: int | None = None, limit: int | None = None
) -> Results:
    """Collective: runs tasks; returns the metrics of each task, and of groups as the harness computes them, on all ranks.

    Args:
        model: the model to evaluate.
        names: names of tasks, groups or tags.
        manager: the index of tasks; see `open_tasks`.
        shots: examples before each question; None uses the task's own number.
        limit: maximum number of questions per task.
    """
    with generators_kept(), _environment_omitted():
        found: Any = evaluator.simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    mine = {} if found is None else {name: dict(metric_values(metrics)) for name, metrics in found["results"].items()}
    return results_of_first(mine, model.answers.topology)  # the harness returns results only on its first process


@contextmanager
def _environment_omitted() -> Iterator[None]:
    """Keeps the harness from adding the installed packages and drivers to its results within the `with` block.

    It runs pip and nvidia-smi on the first process for that, which takes seconds, and all other ranks wait.
    """
    name = "add_env_info"
    add = getattr(evaluator, name, None)
    setattr(evaluator, name, lambda _: None)
    try:
        yield
    finally:
        setattr(evaluator, name, add)
