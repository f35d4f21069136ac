"""Runs tasks of the LM Evaluation Harness (Gao et al., EleutherAI) on a model in training or on stored weights, in any layout.

`HarnessModel` is a `lm_eval.api.model.LM`. Needs the extra `forge-train[eval]`.
"""

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_models.generation import NewText, Sampling, before_stop, generate
from forge_parallel import accelerator
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology

_log = logging.getLogger(__name__)
_NEW_TOKENS = 256
"""New tokens for a task that does not set their number; the default of the harness."""

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
        self.laid_out, self.coder, self.batch = model, tokenizer, batch
        self.end = tokenizer.eos
        self.prefix = prefix if prefix is not None else tokenizer.eos
        self.whole: Any = model.whole()
        self.max_length: int = self.whole.shape.max_length
        self._told = False
        self._before, self._count = before, itertools.count()

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
        topology = self.laid_out.topology
        pairs = [self._row(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]))
        found = torch.zeros(len(pairs), 2, dtype=torch.float64)
        with self._asked():
            for first in range(0, len(order), self.batch * topology.data_size):
                chunk = order[first : first + self.batch * topology.data_size]
                self._before(next(self._count))
                count = -(-len(chunk) // topology.data_size)
                mine = chunk[topology.data_rank * count : (topology.data_rank + 1) * count]
                # Every rank runs the same number of forwards: ranks without a row use a row of zeros.
                tokens = torch.zeros(count, len(pairs[chunk[0]][0]), dtype=torch.int64)
                for row, index in zip(tokens, mine, strict=False):
                    row[: len(pairs[index][0])] = torch.tensor(pairs[index][0])
                logits = self._logits(tokens.to(topology.device))
                for row, index in zip(logits, mine, strict=False):
                    found[index] = _score(row, *pairs[index])
        if topology.size > 1:
            if any(topology.layout.data_rank(rank) == topology.data_rank for rank in range(topology.rank)):
                found.zero_()  # an earlier rank has the same rows and contributes their scores
            found = topology.all_reduce(found.to(topology.device)).cpu()
        return [(likelihood, bool(greedy)) for likelihood, greedy in found.tolist()]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Collective: as `_loglikelihood_tokens`, for texts; rank 0 shows progress."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.laid_out.topology.rank > 0)

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
        texts = [""] * len(requests)
        with self._asked():
            for indices in groups.values():
                wanted = _Wanted.of(requests[indices[0]].args[1])
                room = self.max_length - wanted.tokens
                if room < 1:
                    raise ForgeError(
                        f"a task needs {wanted.tokens} new tokens, but model.max_length = {self.max_length}; "
                        "set max_gen_toks in its generation_kwargs, or remove the task"
                    )
                prompts = {index: self._cut(self.tok_encode(requests[index].args[0]), room) for index in indices}
                order = sorted(indices, key=lambda index: -len(prompts[index]))
                for first in range(0, len(order), self.batch):
                    self._before(next(self._count))
                    chunk = order[first : first + self.batch]
                    made = self._made([prompts[index] or [self.prefix_token_id] for index in chunk], wanted)
                    texts = [made[chunk.index(index)] if index in chunk else text for index, text in enumerate(texts)]
        return texts

    def _made(self, prompts: list[list[int]], wanted: "_Wanted") -> list[str]:
        ends = () if self.end is None else (self.end,)
        rows = generate(
            self.whole,
            prompts,
            wanted.sampling,
            max_tokens=wanted.tokens,
            eos=ends,
            stop=wanted.until,
            decode=self.coder.decode,
            agree=self.laid_out.topology.from_first,
        )
        kept = [row[:-1] if row and row[-1] in ends else row for row in rows]
        added = [NewText(self.coder.decode, prompt)(row) for prompt, row in zip(prompts, kept, strict=True)]
        return [before_stop(text, wanted.until) for text in added]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Returns the input tokens, cut from the left to the model's limit, and the tokens to predict at their end."""
        if not continuation or len(continuation) > self.max_length:
            raise ForgeError(
                f"a task has a continuation of {len(continuation)} tokens; the model supports 1 to max_length = {self.max_length}"
            )
        return self._cut(context + continuation, self.max_length + 1)[:-1], continuation

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        if len(tokens) > length and not self._told:
            self._told = True
            _log.warning("texts of tasks exceed model.max_length = %d; only their last tokens are used", self.max_length)
        return tokens[-length:]

    @contextmanager
    def _asked(self) -> Iterator[None]:
        # Compiled blocks run eagerly, since each batch length would compile another graph.
        with self.laid_out.inference(whole_sequences=True), torch.compiler.set_stance("force_eager"):
            yield

    def _logits(self, tokens: Tensor) -> Tensor:
        """Computes logits: tokens (B, T) -> (B, T, vocab)."""
        layout = self.laid_out.topology.layout
        if layout.pp == layout.cp == 1:
            return self.whole(tokens)
        # With a cache, context-parallel ranks and pipeline stages process whole sequences.
        return self.whole(tokens, positions=None, cache=self.whole.new_cache(*tokens.shape))


class _Wanted:
    """Generation settings of a task."""

    def __init__(self, until: Sequence[str], tokens: int, sampling: Sampling) -> None:
        self.until, self.tokens, self.sampling = tuple(until), tokens, sampling

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "_Wanted":
        """Reads the `generation_kwargs` of a task; decoding is greedy unless `do_sample` or `temperature` requests sampling."""
        rest = dict(given)
        until = rest.pop("until", ())
        tokens = [rest.pop(name) for name in ("max_gen_toks", "max_new_tokens") if name in rest]
        sampled = rest.pop("do_sample", rest.get("temperature", 0) > 0)
        chosen = {name: rest.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in rest}
        penalty = rest.pop("repetition_penalty", 1.0)
        if rest:
            raise ForgeError(
                f"a task sets {', '.join(sorted(rest))} in generation_kwargs, which Forge does not support; remove the option"
            )
        options: dict[str, Any] = {"temperature": 1.0} | chosen if sampled else {"temperature": 0.0}
        sampling = Sampling(repetition_penalty=penalty, **options)
        texts = [until] if isinstance(until, str) else list(until or ())
        return cls([text for text in texts if text], tokens[0] if tokens else _NEW_TOKENS, sampling)


def _score(logits: Tensor, read: list[int], predicted: list[int]) -> Tensor:
    """Returns (2,) fp64 for one row (T, vocab): the sum of log p, and 1 if every predicted token is the most likely one."""
    here = logits[len(read) - len(predicted) : len(read)]
    wide = here.to(torch.promote_types(here.dtype, torch.float32)).log_softmax(dim=-1)
    tokens = torch.tensor(predicted, device=here.device)
    greedy = (here.argmax(dim=-1) == tokens).all()
    return torch.stack([wide.gather(1, tokens[:, None]).sum().double(), greedy.double()]).cpu()


def open_tasks(names: Iterable[str], folder: Path | None) -> TaskManager:
    """Returns the index of tasks, including those in a folder of task files.

    Raises:
        ForgeError: a name is not a task; the error suggests similar names.
    """
    if folder is not None:
        if not folder.is_dir():
            raise ForgeError(f"the folder of tasks {folder} does not exist; create it, or set another folder")
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if all(name in own.all_tasks for name in names):
            return own  # loading the tasks of the harness would read thousands of files
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ForgeError(f"task {name!r} is neither in lm-eval nor in {folder or 'a folder of your own'}{hint}")
    return manager


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
            yield name, _Wanted.of(kwargs if isinstance(kwargs, Mapping) else {}).tokens


def results_of(
    model: HarnessModel, names: Sequence[str], manager: TaskManager, shots: int | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Collective: runs tasks; returns the metrics of each task, and of groups as the harness computes them, on all ranks.

    Args:
        model: the model to evaluate.
        names: names of tasks, groups or tags.
        manager: the index of tasks; see `open_tasks`.
        shots: examples before each question; None uses the task's own number.
        limit: maximum number of questions per task.
    """
    with _generators_kept():
        found: Any = simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    mine = {} if found is None else {name: dict(_numbers(metrics)) for name, metrics in found["results"].items()}
    return _of_first(mine, model.laid_out.topology)  # the harness returns results only on its first process


def _of_first(results: dict[str, dict[str, float]], topology: Topology) -> dict[str, dict[str, float]]:
    """Collective: returns the results of rank 0 on all ranks."""
    if topology.size == 1:
        return results
    payload = torch.tensor(list(json.dumps(results).encode()), dtype=torch.uint8)
    size = int(topology.from_first(torch.tensor(len(payload))))
    return json.loads(
        bytes(topology.from_first(payload if topology.rank == 0 else torch.zeros(size, dtype=torch.uint8)).tolist())
    )


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restores the random generators of Python, numpy and torch after the `with` block, because the harness seeds them."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with accelerator.random_states_kept():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields metrics by name: `acc,none` becomes `acc`; other filters stay in the name."""
    for key, value in metrics.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and not metric.endswith("_stderr") and filtered:
            yield metric if filtered == "none" else key, float(value)
